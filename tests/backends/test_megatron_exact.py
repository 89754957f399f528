"""`run.exact = true` with a Megatron trainer: kept where sums are the engine's, else refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.dist.recipes.conftest import EXAMPLE, run_in

pytestmark = [pytest.mark.dist, pytest.mark.backends]
pytest.importorskip("megatron.core", reason="make test-backends installs megatron-core")

EXACT = ("--trainer.backend.kind=megatron", "--run.exact=true", "--steps=2")


SPLITS = {
    "stages of a pipeline": (2, ("--split.train.pp=2",)),
    "shared matrices": (2, ("--split.train.tp=2", "--trainer.backend.sequence_parallel=true")),
    "shared matrices in both": (2, ("--split.train.tp=2", "--split.infer.tp=2")),
    "shared matrices in the engine": (2, ("--split.infer.tp=2",)),
    "shared sequences": (2, ("--split.train.cp=2",)),
}


def with_heads(folder: Path, num_kv_heads: int) -> str:
    """Write the example's model with two layers and so many key-value heads, and return a flag."""
    shutil.copytree(EXAMPLE / "model", folder)
    path = folder / "config.json"
    changed = {"num_hidden_layers": 2, "tie_word_embeddings": False}
    changed["num_key_value_heads"] = num_kv_heads
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    return f"--model={folder}"


@pytest.mark.parametrize("name", SPLITS)
def test_no_token_is_mismatched(name: str, tmp_path: Path) -> None:
    num_ranks, split = SPLITS[name]
    model = with_heads(tmp_path / "model", 2)
    ended = run_in(tmp_path, "grpo", *EXACT, model, *split, nproc=num_ranks)
    assert ended.code == 0, ended.sentence
    for row in ended.metrics:
        assert row["onpolicy/compared_tokens"] > 0
        assert row["onpolicy/mismatched_tokens"] == 0
    (contract,) = json.loads((ended.folder / "contract.json").read_text())["train->infer"]
    assert "megatron" not in str(contract["facts"])


def test_other_sums_are_refused(tmp_path: Path) -> None:
    """Of two ranks that share one key-value head."""
    model = with_heads(tmp_path / "model", 1)
    ended = run_in(tmp_path, "grpo", *EXACT, model, "--split.train.tp=2", nproc=2)
    assert ended.code != 0
    assert "follow different numeric contracts: network is" in ended.sentence
    assert "local layer spec, tp 2 x pp 1 x cp 1 x ep 1 x etp 1" in ended.sentence
