"""`run.exact = true` with a Megatron trainer: kept where no sum is cut, refused elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.dist.recipes.conftest import EXAMPLE, run_in

pytestmark = [pytest.mark.dist, pytest.mark.backends]
pytest.importorskip("megatron.core", reason="make test-backends installs megatron-core")

EXACT = ("--trainer.backend.kind=megatron", "--run.exact=true", "--steps=2")


def test_stages_of_a_pipeline_count_no_mismatched_token(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE / "model", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    changed = {"num_hidden_layers": 2, "tie_word_embeddings": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    model = f"--model={tmp_path / 'model'}"
    ended = run_in(tmp_path, "grpo", *EXACT, model, "--split.train.pp=2", nproc=2)
    assert ended.code == 0, ended.sentence
    for row in ended.metrics:
        assert row["onpolicy/compared_tokens"] > 0
        assert row["onpolicy/mismatched_tokens"] == 0
    (contract,) = json.loads((ended.folder / "contract.json").read_text())["train->infer"]
    assert "megatron" not in str(contract["facts"])


def test_cut_sums_are_refused(tmp_path: Path) -> None:
    ended = run_in(tmp_path, "grpo", *EXACT, "--split.train.tp=2", nproc=2)
    assert ended.code != 0
    assert "follow different numeric contracts: network is" in ended.sentence
    assert "local layer spec, tp 2 x pp 1 x cp 1 x ep 1" in ended.sentence
