"""A model has a row for each id of its tokenizer, or is refused with both numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from spmd_rl.check.inputs import check_model
from spmd_rl.check.vocabulary import check_vocabulary
from spmd_rl.errors import ConfigError
from spmd_rl.model.tokenizer import light_tokenizer, load_tokenizer

MODEL = Path(__file__).parents[3] / "examples/arithmetic/model"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return shutil.copytree(MODEL, tmp_path / "other")


def test_a_model_has_a_row_for_each_token(other: Path) -> None:
    vocab_size = json.loads((other / "config.json").read_text())["vocab_size"]
    check_vocabulary(str(other), vocab_size)
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    last = max(content["model"]["vocab"].values())
    check_vocabulary(str(other), last + 1)
    with pytest.raises(ConfigError, match=f"ids up to {last}, .* vocab_size of {last}: give"):
        check_vocabulary(str(other), last)
    content["model"]["vocab"]["<late>"] = vocab_size
    file.write_text(json.dumps(content))
    sentence = f"ids up to {vocab_size}, which is '<late>', but config.json has a vocab_size of "
    with pytest.raises(ConfigError, match=f"{sentence}{vocab_size}: give the model a row"):
        check_vocabulary(str(other), vocab_size)


def test_a_token_that_only_transformers_adds(other: Path) -> None:
    """The config names a token that the file of the tokenizer lacks."""
    file = other / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"pad_token": "<late>"}
    file.write_text(json.dumps(config))
    assert light_tokenizer(other) is None
    last = max(load_tokenizer(other).get_vocab().values())
    with pytest.raises(ConfigError, match=f"ids up to {last}, which is '<late>'"):
        check_vocabulary(str(other), last)


def test_an_end_of_text_beyond_the_model(other: Path) -> None:
    """Of a tokenizer without an end of its own, answers end with that of the config."""
    file = other / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config.pop("eos_token", None)
    file.write_text(json.dumps(config))
    file = other / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 5000}))
    (other / "generation_config.json").unlink()
    with pytest.raises(ConfigError, match="ids up to 5000, which is the end of a text, but"):
        check_vocabulary(str(other), 104)


def test_every_recipe_looks(other: Path) -> None:
    file = other / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 90}))
    with pytest.raises(ConfigError, match="ids up to 97, .* has a vocab_size of 90"):
        check_model(str(other))
