"""Adapters in whole runs on real gloo ranks: the same bits, pushes of adapters alone, a resume."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from spmd_rl.model.lora import LoraConfig
from spmd_rl.model.read import read_spec
from tests.dist.recipes.conftest import EXAMPLE
from tests.dist.recipes.test_loops import ARITHMETIC, DISJOINT, EVEN, check_proof
from tests.dist.recipes.test_sleep import exported

pytestmark = pytest.mark.dist

LORA = ("--trainer.lora.rank=8", "--trainer.lr=1e-2", f"--reward={EVEN}")
ADAPTERS_RECIPE = "tests.dist.recipes.adapters_recipe"


def adapter_shapes() -> dict[str, tuple[int, ...]]:
    return LoraConfig(rank=8).shapes(read_spec(EXAMPLE / "model"))


def test_grpo_learns_with_adapters_alone(run: Any) -> None:
    ended = run("grpo", *LORA, "--steps=20", nproc=2)
    check_proof(ended, 20)
    rewards = [row["reward/mean"] for row in ended.metrics]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1, rewards
    for row in ended.metrics:
        assert row["sync/tensors"] == 2 * len(adapter_shapes())
    assert {path.name for path in (ended.folder / "hf").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
    }


@pytest.mark.parametrize("num_shards", [pytest.param(1, marks=pytest.mark.system), 2])
def test_the_base_takes_the_place_of_a_frozen_reference(run: Any, num_shards: int) -> None:
    """A reference with ranks of its own is still a frozen model."""
    words = (*LORA, "--steps=3", "--kl.coef=0.1", "--trainer.deterministic=true")
    ranks = f"0-{num_shards - 1}"
    shared = (f"--split.train.ranks={ranks}", f"--split.infer.ranks={ranks}")
    frozen = f"--split.reference.ranks={num_shards}-{num_shards}"
    ended = run("grpo", *words, nproc=num_shards, name="base")
    earlier = run("grpo", *words, *shared, frozen, nproc=num_shards + 1, name="frozen")
    for one in (ended, earlier):
        check_proof(one, 3)
    for name in ("train/kl", "train/loss", "train/grad_norm"):
        values = [[row[name] for row in one.metrics] for one in (ended, earlier)]
        assert values[0] == values[1]
    assert ended.metrics[2]["train/kl"] > 0
    assert exported(ended) == exported(earlier) != {}


def test_the_base_comes_from_the_model_folder(run: Any) -> None:
    whole = run(ARITHMETIC, "--steps=0", "--warmup_steps=5", name="whole")
    assert whole.code == 0, whole.sentence
    base = f"--model={whole.folder / 'hf'}"
    ended = run("grpo", *LORA, base, "--trainer.init=folder", "--steps=2", nproc=2, name="adapters")
    check_proof(ended, 2)
    checkpoint = f"--checkpoint={ended.folder / 'checkpoints/step_000002'}"
    data = f"--data={EXAMPLE / 'eval.jsonl'}@[:3]"
    scores = run("evaluate", checkpoint, data, "--sampling.max_tokens=2", name="s", small=False)
    assert scores.code == 0, "model and adapters are those of the run: " + scores.sentence


def test_a_run_begins_with_exported_adapters(run: Any) -> None:
    """Its reference is still the base, so that it differs from the policy at once."""
    first = run("grpo", *LORA, "--steps=2", name="first")
    words = (*LORA, f"--trainer.lora.folder={first.folder / 'hf'}", "--kl.coef=0.1")
    again = run("grpo", *words, "--steps=0", nproc=2, name="again")
    assert first.code == again.code == 0, again.sentence
    assert exported(again) == exported(first) != {}
    ended = run("grpo", *words, "--steps=1", nproc=2, name="ended")
    check_proof(ended, 1)
    assert ended.metrics[0]["train/kl"] != 0
    refused = run("grpo", *words, "--trainer.lora.rank=4", name="refused")
    assert "set trainer.lora.rank = 8" in refused.sentence
    assert not refused.folder.exists(), "it is refused before anything starts"


@pytest.mark.parametrize("split", [(), DISJOINT])
def test_a_push_moves_adapters_alone(run: Any, split: tuple[str, ...]) -> None:
    ended = run(ADAPTERS_RECIPE, *LORA, *split, nproc=2)
    assert ended.code == 0, ended.sentence
    num_engines = 1 if split else 2
    num_bytes = 4 * sum(math.prod(shape) for shape in adapter_shapes().values())
    assert json.loads((ended.folder / "pushed.json").read_text()) == {
        "bytes_moved": num_engines * num_bytes,
        "num_tensors": num_engines * len(adapter_shapes()),
        "num_verified": num_engines * len(adapter_shapes()),
    }


def test_another_base_is_refused_before_a_push(run: Any) -> None:
    ended = run(ADAPTERS_RECIPE, *LORA, "--other_base=true")
    assert ended.code != 0
    assert "follow different numeric contracts: base_weights is" in ended.sentence
    assert not (ended.folder / "pushed.json").exists()
