"""Models with layers that hand a state on, in whole runs beside other settings: equal bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmd_rl.model.hf import random_weights
from spmd_rl.model.read import read_spec
from tests.dist.recipes.conftest import EXAMPLE, Ended, run_in
from tests.system import kill_resume

pytestmark = pytest.mark.dist

DENSE: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MIXTURE = DENSE | {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48,
}
# of each: is it a mixture, how many ranks, and settings
RUNS: dict[str, tuple[bool, int, tuple[str, ...]]] = {
    "sharded over two ranks": (False, 2, ()),
    "a rank for each role": (False, 2, ("--split.train.ranks=1", "--split.infer.ranks=1")),
    "samples that go on": (False, 2, tuple(kill_resume.ROUNDS)),
    "adapters": (False, 2, ("--trainer.lora.rank=4",)),
    "codes of weights": (False, 1, ("--trainer.weights=int4", "--engine.weights=int4")),
    "codes of keys and values": (False, 1, ("--trainer.cache=e4m3", "--engine.cache=e4m3")),
    "recomputed where it is cheap": (False, 1, ("--trainer.backend.recompute=cheap",)),
    "bfloat16": (False, 1, ("--trainer.dtype=bfloat16", "--engine.dtype=bfloat16")),
    "muon": (False, 2, ("--trainer.optimizer.kind=muon",)),
    "experts": (True, 1, ()),
    "shared experts": (True, 2, ("--split.train.ep=2",)),
    "shared experts of engines": (True, 2, ("--split.infer.ep=2",)),
    "routes replayed": (True, 1, ("--sampling.replay_routes=true",)),
}


def write_hybrid(folder: Path, config: dict[str, Any]) -> Path:
    """Write a folder with weights, and a tensor that predicts further tokens."""
    shutil.copytree(EXAMPLE / "model", folder)
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | config))
    spec = read_spec(folder)
    weights = dict(random_weights(spec, 3))
    save_file(weights | {"mtp.norm.weight": torch.ones(64)}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    at = tmp_path_factory.mktemp("hybrids")
    return {
        is_mixture: write_hybrid(at / str(is_mixture), config)
        for is_mixture, config in ((False, DENSE), (True, MIXTURE))
    }


@pytest.mark.parametrize("name", RUNS)
def test_no_token_has_other_bits(name: str, folders: dict[bool, Path], tmp_path: Path) -> None:
    is_mixture, nproc, words = RUNS[name]
    ended = grpo(tmp_path, folders[is_mixture], *words, nproc=nproc)
    assert ended.code == 0, ended.sentence
    assert len(ended.metrics) == 3
    assert {row["onpolicy/mismatched_tokens"] for row in ended.metrics} == {0}
    if name == "adapters":
        return
    stored = load_file(ended.folder / "hf" / "model.safetensors")
    assert stored.keys() == load_file(folders[is_mixture] / "model.safetensors").keys()


def grpo(at: Path, model: Path, *words: str, nproc: int) -> Ended:
    return run_in(
        at,
        "grpo",
        f"--model={model}",
        f"--reward={kill_resume.__file__.replace('kill_resume', 'even')}:even",
        "--trainer.init=folder",
        "--steps=3",
        "--run.verify_every=1",
        *words,
        nproc=nproc,
        name="r",
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--split.train.tp=2", "split.train.tp = 2 does not go with"),
        ("--split.train.cp=2", "split.train.cp = 2 does not go with"),
        ("--split.infer.tp=2", "split.infer.tp = 2 does not go with"),
        ("--run.row_shards=2", "run.row_shards = 2 does not go with"),
        ("--trainer.backend.kind=megatron", "set trainer.backend.kind = 'fsdp2'"),
    ],
)
def test_what_is_not_built_is_refused(
    words: str, sentence: str, folders: dict[bool, Path], tmp_path: Path
) -> None:
    ended = grpo(tmp_path, folders[False], *words.split(), nproc=2)
    assert ended.code != 0 and sentence in ended.sentence
