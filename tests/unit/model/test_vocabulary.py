"""Two models have one vocabulary, or the first difference is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from spmd_rl.errors import ConfigError
from spmd_rl.model.vocabulary import check_same_vocabulary

MODEL = Path(__file__).parents[3] / "examples/arithmetic/model"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return shutil.copytree(MODEL, tmp_path / "other")


def test_the_same_vocabulary_is_accepted(other: Path) -> None:
    check_same_vocabulary(str(MODEL), str(other))
    check_same_vocabulary(str(MODEL), str(MODEL.with_name("model-20m")))


def test_another_vocabulary_is_refused(other: Path) -> None:
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    ids = content["model"]["vocab"]
    ids["7"], ids["8"] = ids["8"], ids["7"]
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"the token '7' is \d+ there and \d+ here"):
        check_same_vocabulary(str(MODEL), str(other))
    del ids["8"]
    ids["€"] = ids.pop("7")
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="is missing there and .* here"):
        check_same_vocabulary(str(MODEL), str(other))
