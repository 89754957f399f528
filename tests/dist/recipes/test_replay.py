"""Recorded samples train the same weights again, bit for bit, in runs without an engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.recipes.conftest import SMALL, Ended

pytestmark = [pytest.mark.dist, pytest.mark.system]

STEPS = 3
EVEN = f"--reward={Path(__file__).parents[2] / 'system/even.py'}:even"


def weights(ended: Ended) -> bytes:
    return (ended.folder / "hf/model.safetensors").read_bytes()


def learned(ended: Ended) -> list[dict[str, float]]:
    """What the train steps measured, without times."""
    return [
        {key: value for key, value in row.items() if key.startswith(("train/", "onpolicy/"))}
        for row in ended.metrics
    ]


@pytest.fixture
def replay(run: Any) -> Callable[..., Ended]:
    """Run `replay` on the settings and the samples of a run."""

    def whole(recorded: Ended, name: str, *, nproc: int, samples: Path | None = None) -> Ended:
        words = (
            f"--config={recorded.folder / 'config.toml'}",
            f"--recorded={samples or recorded.folder}",
        )
        ended = run("replay", *words, nproc=nproc, name=name, small=False)
        assert ended.code == 0, ended.sentence
        return ended

    return whole


def copied(recorded: Ended, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Copy the samples of a run, with one sample of the first step changed."""
    (folder / "samples").mkdir(parents=True)
    for step in range(1, STEPS + 1):
        rows = recorded.samples(step)
        if step == 1:
            change(rows[0])
        (folder / f"samples/step_{step:05d}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    return folder


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("grpo", ("--sampling.top_k=20", "--kl.coef=0.01")),
        ("grpo_fully_async", ("--sampler.max_lag=1", "--trainer.minibatches=2")),
    ],
)
def test_a_replay_trains_the_same_bits(
    run: Any, replay: Callable[..., Ended], tmp_path: Path, recipe: str, words: tuple[str, ...]
) -> None:
    recorded = run(recipe, f"--steps={STEPS}", *words, nproc=2)
    assert recorded.code == 0, recorded.sentence
    replayed = replay(recorded, "replayed", nproc=2)
    assert weights(replayed) == weights(recorded)
    assert learned(replayed) == learned(recorded)
    assert replayed.samples(STEPS) == recorded.samples(STEPS)

    def nudge(row: dict[str, Any]) -> None:
        row["reward"] += 0.25

    other = replay(recorded, "other", nproc=2, samples=copied(recorded, tmp_path / "o", nudge))
    assert weights(other) != weights(recorded)


def test_collected_samples_are_trained_on(run: Any) -> None:
    """The first step is on policy. A step that was not recorded is refused before the start."""
    first = run("grpo", "--steps=1", name="first")
    small = ("--prompts_per_step=8", "--sampling.num_samples=4", "--sampling.max_tokens=4")
    settings = (f"--model={first.folder / 'hf'}", *small, f"--steps={STEPS - 1}")
    data = next(word for word in SMALL if word.startswith("--data"))
    collected = run("collect", *settings, data, EVEN, name="collected", small=False)
    assert collected.code == 0, collected.sentence
    words = ("replay", f"--recorded={collected.folder}", *settings)
    trained = run(*words, name="trained", small=False)
    assert trained.code == 0, trained.sentence
    assert trained.metrics[0]["onpolicy/mismatched_tokens"] == 0
    assert trained.metrics[0]["onpolicy/compared_tokens"] > 0
    assert trained.metrics[0]["train/grad_norm"] > 0
    refused = run(*words, f"--steps={STEPS}", name="refused", small=False)
    assert refused.code == 2
    assert f"the last step with samples is {STEPS - 1}" in refused.sentence
