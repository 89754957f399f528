"""Models with windows, sinks and experts with biases, in whole runs beside other settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from spmd_rl.model.hf import random_weights, save_folder
from spmd_rl.model.read import read_spec
from tests.dist.recipes import family_runs
from tests.dist.recipes.conftest import EXAMPLE
from tests.dist.recipes.family_runs import unchanged_by_run
from tests.dist.recipes.test_hybrids import grpo

pytestmark = pytest.mark.dist

WINDOWS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 3,
    "sliding_window": 6,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 40,
    "attention_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
ALL_RUNS = family_runs.RUNS | {
    "routes that are replayed": (1, ("--sampling.replay_routes=true",)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("windows")
    shutil.copytree(EXAMPLE / "model", at / "bare")
    known = json.loads((at / "bare" / "config.json").read_text())
    known.pop("rope_scaling", None)
    (at / "bare" / "config.json").write_text(json.dumps(known | WINDOWS))
    (at / "bare" / "model.safetensors").unlink(missing_ok=True)
    weights = {
        # sinks that begin at zero would hide what a kernel does with them
        name: one + torch.linspace(-1, 1, len(one)) if name.endswith("sinks") else one
        for name, one in random_weights(read_spec(at / "bare"), 3)
    }
    save_folder(at / "model", at / "bare", weights.items())
    return at / "model"


@pytest.mark.parametrize("name", ALL_RUNS)
def test_no_token_has_other_bits(name: str, folder: Path, tmp_path: Path) -> None:
    assert unchanged_by_run(tmp_path, folder, *ALL_RUNS[name]) == set()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--split.train.tp=2",), "attention in windows or with sinks"),
        (("--split.train.cp=2",), "attention in windows or with sinks"),
        (("--split.infer.tp=2",), "attention in windows or with sinks"),
        (
            ("--trainer.backend.kind=megatron", "--run.exact=false"),
            "attention in windows or with sinks",
        ),
        (("--split.train.ep=2",), "experts with biases"),
    ],
)
def test_what_is_not_built_is_refused(
    words: tuple[str, ...], said: str, folder: Path, tmp_path: Path
) -> None:
    ended = grpo(tmp_path, folder, *words, nproc=2)
    assert ended.code != 0
    assert said in ended.sentence
