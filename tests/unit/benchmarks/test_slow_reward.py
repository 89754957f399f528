"""What the benchmark of a slow reward makes of its turns, and what its rewards note."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks import slow_reward_recipe
from benchmarks.slow_reward import Measured, rows_of
from benchmarks.slow_reward_recipe import GRADED, Drawn, Grading, Turn
from spmd_rl.hooks.context import HookContext
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample


def turn(grading: Grading, seconds: float) -> Turn:
    return Turn(grading, Drawn(1000, seconds, seconds, 0.01), seconds + 5, 0.0)


@pytest.mark.parametrize(
    ("slow_s", "graded", "held"),
    [
        (1.04, {1: 1, 2: 1}, [True, True, True]),
        (1.07, {1: 1, 2: 1}, [False, True, True]),
        (2.0, {1: 1, 2: 1}, [False, False, True]),
        (1.0, {1: 2, 2: 1}, [True, True, False]),
        (1.0, {1: 1}, [True, True, False]),
    ],
)
def test_bars(slow_s: float, graded: dict[int, int], held: list[bool]) -> None:
    turns = [turn("none", 1.0), turn("fast", 1.03), turn("slow", slow_s)]
    rows = rows_of("model", Measured(turns, Counter(graded), 2))
    assert [row.holds for row in rows if row.bar is not None] == held


@pytest.mark.parametrize("kind", ["plain", "awaited"])
def test_every_tenth_sample_is_slow_and_all_are_noted(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(slow_reward_recipe.time, "sleep", slept.append)
    monkeypatch.setattr(slow_reward_recipe.asyncio, "sleep", sleep)
    (tmp_path / "run").mkdir()
    ctx = HookContext({"sleep_s": 5.0, "run": {"folder": str(tmp_path), "name": "run"}})
    empty = np.zeros(0, np.int32)
    for source in ("fast", "slow"):
        for uid in range(20):
            prompt = Prompt(uid, empty, source=source)
            sample = Sample(uid, 0, empty, np.zeros(0, np.float32), empty, "completed")
            given = getattr(slow_reward_recipe, kind)(ctx, prompt, sample)
            assert (given if kind == "plain" else asyncio.run(given)) == 1.0
    assert slept == [5.0, 5.0]
    assert (tmp_path / "run" / GRADED).read_text().split() == [*map(str, range(20))] * 2
