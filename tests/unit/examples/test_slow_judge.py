"""The slow judge: its verdicts are those of the arithmetic example, its times are repeatable."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from examples.slow_judge import judge
from spmd_rl.config.load import load
from spmd_rl.hooks.context import HookContext
from spmd_rl.hooks.signatures import load_reward
from spmd_rl.recipes import grpo, grpo_fully_async
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "slow_judge"
PROMPT = Prompt(0, np.zeros(1, np.int32), "37+48=", "85")
NONE = np.zeros(0)


def verdicts(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """Return what the judge says of the samples of one prompt, without its waits."""
    waited: list[float] = []

    async def note(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(judge.asyncio, "sleep", note)
    graded = [
        asyncio.run(
            judge.judge(
                HookContext(seed=5, prompt_uid=0, sample_index=index),
                PROMPT,
                Sample(0, index, NONE, NONE, NONE, "completed", text=text),
            )
        )
        for index, text in enumerate(texts)
    ]
    assert [grade["judge_s"] for grade in graded] == waited
    return graded


def test_verdicts_and_times(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["85", "86", "85 "] * 300
    graded = verdicts(texts, monkeypatch)
    assert [grade["reward"] for grade in graded[:3]] == [1.0, 0.0, 0.0]
    assert graded == verdicts(texts, monkeypatch)
    times = np.array([grade["judge_s"] for grade in graded])
    assert 0.005 < np.mean(times == judge.LONGEST_S) < 0.05
    usual = times[times != judge.LONGEST_S]
    assert usual.min() >= 0
    assert judge.USUAL_S * 0.9 < usual.max() <= judge.USUAL_S
    assert load_reward(f"{EXAMPLE / 'judge.py'}:judge").form.is_async


def test_both_runs_differ_in_the_sampler_alone() -> None:
    alone = load(grpo.Config, EXAMPLE / "grpo.toml")
    ahead = load(grpo_fully_async.Config, EXAMPLE / "grpo_fully_async.toml")
    for name in ("model", "data", "reward", "steps", "prompts_per_step", "hooks", "sampling"):
        assert getattr(alone, name) == getattr(ahead, name)
    assert alone.trainer == ahead.trainer
    assert (alone.sampler.max_lag, ahead.sampler.max_lag) == (0, 4)
    waiting = (ahead.sampler.max_lag + 1) * ahead.prompts_per_step * ahead.sampling.num_samples
    assert waiting <= ahead.hooks.concurrency
