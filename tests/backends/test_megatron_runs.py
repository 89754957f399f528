"""Whole runs with a trainer of Megatron-core on gloo ranks, beside the native engine."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from examples.arithmetic import generate
from spmd_rl.cli.main import dispatch
from tests.backends.megatron_case import FAMILIES, SIZES
from tests.dist.recipes.conftest import EXAMPLE, Run
from tests.fakes.sglang_child import write_site

pytestmark = [pytest.mark.dist, pytest.mark.backends]
pytest.importorskip("megatron.core", reason="make test-backends installs megatron-core")

MEGATRON = ("--trainer.backend.kind=megatron", "--run.exact=false")
LAST = 5  # steps that a reward is the mean of
SPLITS = {
    "tp 2": (2, ("--split.train.tp=2",)),
    "pp 2": (2, ("--split.train.pp=2",)),
    "tp 2 beside the engine": (
        3,
        ("--split.train.tp=2", "--split.train.ranks=2", "--split.infer.ranks=1"),
    ),
    "pp 2 beside the engine": (
        3,
        ("--split.train.pp=2", "--split.train.ranks=2", "--split.infer.ranks=1"),
    ),
}


@pytest.fixture(scope="module")
def small_sums(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The words that name all sums of two digits, and what a careless teacher says to them."""
    folder, rng = tmp_path_factory.mktemp("sums"), random.Random(0)
    pairs = generate.sums(0, 9, 0, rng)
    generate.write(folder / "train.jsonl", (generate.record(pair, sum(pair)) for pair in pairs))
    lessons = (generate.record(pair, generate.careless(pair, 0.45, rng)) for pair in pairs * 4)
    generate.write(folder / "warmup.jsonl", lessons)
    return (
        f"--data={folder / 'train.jsonl'}",
        f"--warmup_data={folder / 'warmup.jsonl'}",
        f"--reward={EXAMPLE / 'reward.py'}:correct",
    )


@pytest.mark.parametrize("name", SPLITS)
def test_sums_are_learned(
    name: str, run: Run, two_layers: Path, small_sums: tuple[str, ...]
) -> None:
    """The careless teacher is right in 45 of 100 answers; the rewards outgrow it."""
    num_ranks, split = SPLITS[name]
    words = (f"--model={two_layers}", *small_sums, *split, MEGATRON[0], "--run.exact=true")
    words += ("--warmup_steps=40", "--warmup_pairs=100", "--warmup_lr=4e-3", "--steps=30")
    words += ("--prompts_per_step=32", "--sampling.num_samples=8", "--sampling.max_tokens=4")
    words += ("--trainer.init=random", "--trainer.lr=3e-3", "--trainer.betas=[0.9,0.99]")
    ended = run(str(EXAMPLE / "recipe.py"), *words, nproc=num_ranks)
    assert ended.code == 0, ended.sentence
    assert ended.sentence == "", "no warning that a user cannot act on"
    rewards = [row["reward/mean"] for row in ended.metrics]
    first, last = (sum(part) / LAST for part in (rewards[:LAST], rewards[-LAST:]))
    assert first <= 0.5
    assert last >= max(0.65, first + 0.2)
    for row in ended.metrics:
        assert row["onpolicy/compared_tokens"] > 0
        assert row["onpolicy/mismatched_tokens"] == 0
        assert row["version/lag_max"] == 0


def test_a_mixture_of_experts_imitates_its_data(
    run: Run, tmp_path: Path, small_sums: tuple[str, ...]
) -> None:
    """With half of the experts on each rank; the run and `spmd-rl export` write the same folder."""
    model = tmp_path / "mixture"
    shutil.copytree(EXAMPLE / "model", model)
    config = SIZES | FAMILIES["qwen3_moe"] | {"vocab_size": 104}
    (model / "config.json").write_text(json.dumps(config))
    words = (f"--model={model}", small_sums[0], MEGATRON[0], "--split.train.ep=2")
    words += ("--trainer.init=random", "--trainer.lr=3e-3", "--steps=10")
    ended = run("sft", *words, nproc=2)
    assert ended.code == 0, ended.sentence
    assert ended.metrics[-1]["train/loss"] < 0.6 * ended.metrics[0]["train/loss"]
    assert dispatch(["export", str(ended.folder), str(tmp_path / "again")]) == 0
    files = [folder / "model.safetensors" for folder in (ended.folder / "hf", tmp_path / "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    AutoModelForCausalLM.from_pretrained(ended.folder / "hf")


def test_an_engine_of_sglang_takes_the_weights(
    run: Run, tmp_path: Path, two_layers: Path, small_sums: tuple[str, ...]
) -> None:
    """A fake one, in a child of each rank; each push is compared at both ends."""
    words = (f"--model={two_layers}", *small_sums[:1], *small_sums[2:], "--split.train.tp=2")
    words += ("--engine.kind=sglang", f"--engine.python={write_site(tmp_path / 'site')}")
    words += (*MEGATRON, "--trainer.init=random", "--prompts_per_step=4", "--steps=2")
    ended = run("grpo", *words, "--sampling.num_samples=4", "--sampling.max_tokens=4", nproc=2)
    assert ended.code == 0, ended.sentence
    for row in ended.metrics:
        assert row["sync/verified_tensors"] > 0
        assert row["onpolicy/compared_tokens"] > 0
