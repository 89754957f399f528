"""Merged pushes in whole runs on real gloo ranks: the engine's weights, what is learned, sleep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spmd_rl.model.hf import random_weights
from spmd_rl.model.read import read_spec
from tests.dist.recipes.conftest import EXAMPLE, run_in
from tests.dist.recipes.test_loops import DISJOINT, check_proof
from tests.dist.recipes.test_lora import LORA, adapter_shapes
from tests.fakes.sglang_child import write_site

pytestmark = pytest.mark.dist

MERGED = (*LORA, "--trainer.lora.merged_push=true", "--run.exact=false")
RECIPE = "tests.dist.recipes.merged_recipe"
REPLICAS = ("--split.train.dp=2",)
SHARDED = ("--split.train.ranks=2", "--split.infer.ranks=1")


def merged_by_hand(adapters: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the random base of seed 0 with the adapters of a PEFT folder merged as PEFT does."""
    stored = load_file(adapters / "adapter_model.safetensors")
    config = json.loads((adapters / "adapter_config.json").read_text())
    found = {}
    for name, weight in random_weights(read_spec(EXAMPLE / "model"), 0):
        key = f"base_model.model.{name.removesuffix('.weight')}"
        found[name] = weight.to(dtype)
        if f"{key}.lora_A.weight" in stored:
            a, b = (stored.pop(f"{key}.lora_{one}.weight") for one in "AB")
            assert b.any()
            delta = (b @ a) * (config["lora_alpha"] / config["r"])
            found[name] = (found[name].float() + delta).to(dtype)
    assert stored == {}
    return found


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT folder of adapters that have learned."""
    ended = run_in(tmp_path_factory.mktemp("adapters"), "grpo", *LORA, "--steps=2")
    check_proof(ended, 2)
    return ended.folder / "hf"


@pytest.mark.parametrize(
    ("nproc", "split", "dtype"),
    [
        (1, (), "bfloat16"),
        (2, (), "float32"),
        (2, (), "bfloat16"),
        (2, REPLICAS, "bfloat16"),
        (2, DISJOINT, "float32"),
        (3, SHARDED, "bfloat16"),
    ],
)
def test_an_engine_has_the_weights_that_peft_merges(
    run: Any, adapters: Path, dtype: str, nproc: int, split: tuple[str, ...]
) -> None:
    words = (f"--trainer.lora.folder={adapters}", f"--trainer.dtype={dtype}")
    ended = run(RECIPE, *MERGED, *words, f"--engine.dtype={dtype}", *split, nproc=nproc)
    assert ended.code == 0, ended.sentence
    expected = merged_by_hand(adapters, getattr(torch, dtype))
    files = sorted(ended.folder.glob("engine-*.safetensors"))
    assert len(files) == (1 if split in (DISJOINT, SHARDED) else nproc)
    for file in files:
        held = load_file(file)
        assert held.keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.equal(held[name], weight), name
    base = dict(random_weights(read_spec(EXAMPLE / "model"), 0))
    num_merged = sum(not torch.equal(base[name].to(one.dtype), one) for name, one in held.items())
    assert num_merged == len(adapter_shapes()) / 2, "adapters matter"


def test_grpo_learns_and_says_how_far_log_probs_are(run: Any) -> None:
    """With adapters pushed alone, the same run has none that differs."""
    ended = run("grpo", *MERGED, "--steps=20", nproc=2, name="merged")
    assert ended.code == 0, ended.sentence
    assert "trainer.lora.merged_push = true: the engine's log-probs are not" in ended.output
    rewards = [row["reward/mean"] for row in ended.metrics]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1, rewards
    for row in ended.metrics[1:]:  # B is zero in the first step
        assert row["onpolicy/mismatched_tokens"] > 0
        assert 0 < row["onpolicy/mean_abs_dlogp"] < 1e-4
    contracts = json.loads((ended.folder / "contract.json").read_text())["train->infer"]
    facts = [one["facts"] for one in contracts]
    assert [one.get("push", "").rpartition(", ")[2] for one in facts] == ["no promise", ""]
    control = run("grpo", *LORA, "--steps=2", nproc=2, name="alone")
    check_proof(control, 2)
    assert control.metrics[1]["onpolicy/mean_abs_dlogp"] == 0


def test_sglang_generates_for_a_trainer_of_adapters(run: Any, tmp_path: Path) -> None:
    site = write_site(tmp_path / "site")
    engine = ("--engine.kind=sglang", f"--engine.python={site}")
    ended = run("grpo", *MERGED, *engine, "--steps=2", nproc=2)
    assert ended.code == 0, ended.sentence
    for row in ended.metrics:
        assert row["sync/tensors"] == 2 * len(read_spec(EXAMPLE / "model").parameter_shapes())
        assert row["onpolicy/mean_abs_dlogp"] > 0
