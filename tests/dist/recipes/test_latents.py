"""Models with attention to latents, in whole runs beside other settings: equal bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from spmd_rl.model.hf import random_weights
from spmd_rl.model.read import read_spec
from tests.dist.recipes import family_runs
from tests.dist.recipes.conftest import EXAMPLE
from tests.dist.recipes.family_runs import unchanged_by_run
from tests.dist.recipes.test_hybrids import grpo

pytestmark = pytest.mark.dist

LATENTS: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
}
ALL_RUNS = family_runs.RUNS | {
    "shared experts": (2, ("--split.train.ep=2",)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights, and with the layer that predicts further tokens."""
    at = tmp_path_factory.mktemp("latents") / "model"
    shutil.copytree(EXAMPLE / "model", at)
    known = json.loads((at / "config.json").read_text())
    (at / "config.json").write_text(json.dumps(known | LATENTS))
    weights = dict(random_weights(read_spec(at), 3))
    further = {"model.layers.3.eh_proj.weight": torch.ones(4, 6)}
    save_file(weights | further, at / "model.safetensors")
    return at


@pytest.mark.parametrize("name", ALL_RUNS)
def test_no_token_has_other_bits(name: str, folder: Path, tmp_path: Path) -> None:
    kept = unchanged_by_run(tmp_path, folder, *ALL_RUNS[name])
    others = {one for one in kept if "e_score_correction_bias" not in one}
    assert others == ({"model.layers.3.eh_proj.weight"} if name != "adapters" else set())


@pytest.mark.parametrize(
    "words",
    [
        ("--split.train.tp=2",),
        ("--split.train.cp=2",),
        ("--split.infer.tp=2",),
        ("--trainer.backend.kind=megatron", "--run.exact=false"),
    ],
)
def test_what_is_not_built_is_refused(words: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    ended = grpo(tmp_path, folder, *words, nproc=2)
    assert ended.code != 0
    assert "attention to latents" in ended.sentence
