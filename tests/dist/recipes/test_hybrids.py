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
from spmd_rl.model.spec import ModelSpec
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
SEES: dict[str, Any] = {"model_type": "qwen3_5", "vision_config": {"depth": 1}}
FOLDERS = {"dense": DENSE, "mixture": MIXTURE, "sees": SEES}
# of each: its folder, how many ranks, and settings
RUNS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "sharded over two ranks": ("dense", 2, ()),
    "a rank for each role": ("dense", 2, ("--split.train.ranks=1", "--split.infer.ranks=1")),
    "samples that go on": ("dense", 2, tuple(kill_resume.ROUNDS)),
    "adapters": ("dense", 2, ("--trainer.lora.rank=4",)),
    "codes of weights": ("dense", 1, ("--trainer.weights=int4", "--engine.weights=int4")),
    "codes of keys and values": ("dense", 1, ("--trainer.cache=e4m3", "--engine.cache=e4m3")),
    "recomputed where it is cheap": ("dense", 1, ("--trainer.backend.recompute=cheap",)),
    "bfloat16": ("dense", 1, ("--trainer.dtype=bfloat16", "--engine.dtype=bfloat16")),
    "muon": ("dense", 2, ("--trainer.optimizer.kind=muon",)),
    "the text model of a folder that sees": ("sees", 2, ()),
    "experts": ("mixture", 1, ()),
    "shared experts": ("mixture", 2, ("--split.train.ep=2",)),
    "shared experts of engines": ("mixture", 2, ("--split.infer.ep=2",)),
    "routes replayed": ("mixture", 1, ("--sampling.replay_routes=true",)),
}


def write_hybrid(folder: Path, config: dict[str, Any]) -> Path:
    """Write a folder with weights, and tensors that text models do not have."""
    shutil.copytree(EXAMPLE / "model", folder)
    known = json.loads((folder / "config.json").read_text())
    beside = {"mtp.norm.weight": torch.ones(64)}
    if "vision_config" in config:
        known = {"text_config": known | DENSE, "tie_word_embeddings": True}
        beside["model.visual.patch_embed.proj.weight"] = torch.ones(3, 5).bfloat16()
    (folder / "config.json").write_text(json.dumps(known | config))
    spec = read_spec(folder)
    weights = {in_folder(spec, name): one for name, one in random_weights(spec, 3)}
    save_file(weights | beside, folder / "model.safetensors")
    return folder


def in_folder(spec: ModelSpec, name: str) -> str:
    prefix = spec.folder_prefix
    return prefix + name.removeprefix("model.") if prefix and name.startswith("model.") else name


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("hybrids")
    return {name: write_hybrid(at / name, config) for name, config in FOLDERS.items()}


@pytest.mark.parametrize("name", RUNS)
def test_no_token_has_other_bits(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder, nproc, words = RUNS[name]
    ended = grpo(tmp_path, folders[folder], *words, nproc=nproc)
    assert ended.code == 0, ended.sentence
    assert len(ended.metrics) == 3
    assert {row["onpolicy/mismatched_tokens"] for row in ended.metrics} == {0}
    if name == "adapters":
        return
    stored, first = (
        load_file(at / "model.safetensors") for at in (ended.folder / "hf", folders[folder])
    )
    assert stored.keys() == first.keys()
    kept = {name for name, one in stored.items() if torch.equal(one, first[name])}
    assert kept == {name for name in first if name.startswith(("mtp.", "model.visual."))}


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
    words: str, sentence: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    ended = grpo(tmp_path, folders["dense"], *words.split(), nproc=2)
    assert ended.code != 0 and sentence in ended.sentence
