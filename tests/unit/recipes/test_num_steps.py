"""Steps of a run from passes over its data."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spmd_rl.config.load import load
from spmd_rl.errors import ConfigError
from spmd_rl.recipes import grpo, replay
from spmd_rl.recipes.num_steps import first_step, num_steps

NEEDED = ["model=m", "data=d", "prompts_per_step=32"]


@pytest.mark.parametrize(
    ("words", "num_prompts", "expected"),
    [
        ([], 100, 200),
        (["steps=7"], 100, 7),
        (["steps=0"], 100, 0),
        (["epochs=1"], 320, 10),
        (["epochs=1"], 321, 11),
        (["epochs=2.5"], 320, 25),
        (["epochs=0.1"], 960, 3),
        (["epochs=0.3"], 320, 3),
        (["epochs=0.001"], 320, 1),
    ],
)
def test_how_many_steps(words: list[str], num_prompts: int, expected: int) -> None:
    assert num_steps(load(grpo.Config, overrides=NEEDED + words), range(num_prompts)) == expected


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["epochs=1", "steps=7"], "epochs = 1.0: expected 0 beside steps = 7: give one"),
        (["epochs=-1"], "epochs = -1.0: expected 0 (steps counts) or more, and finite"),
        (["start_step=-1"], "start_step = -1: expected 0 or more"),
        (["start_step=7", "steps=7"], "start_step = 7: expected less than steps = 7"),
        (["epochs=inf"], "epochs = inf: expected 0 (steps counts) or more, and finite"),
    ],
)
def test_lengths_that_cannot_be(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as told:
        load(grpo.Config, overrides=NEEDED + words)
    assert sentence in str(told.value)


def test_a_replay_has_no_epochs() -> None:
    with pytest.raises(ConfigError, match="a replay counts in steps"):
        load(replay.Config, overrides=[*NEEDED, "recorded=r", "epochs=1"])


def test_a_replay_has_no_start_step() -> None:
    with pytest.raises(ConfigError, match="a replay begins with the first step"):
        load(replay.Config, overrides=[*NEEDED, "recorded=r", "start_step=1"])


@pytest.mark.parametrize(("resumed", "expected", "skipped"), [(0, 3, [12]), (5, 5, []), (3, 3, [])])
def test_where_a_run_begins(resumed: int, expected: int, skipped: list[int]) -> None:
    """A checkpoint goes before the start step, which only a new run skips to."""
    cfg = load(grpo.Config, overrides=["model=m", "data=d", "prompts_per_step=4", "start_step=3"])
    told: list[int] = []
    trainer: Any = SimpleNamespace(begin_after=SimpleNamespace(call=told.append))
    skips: list[int] = []
    data: Any = SimpleNamespace(skip=skips.append)
    assert first_step(cfg, resumed, [trainer], data) == expected
    assert skips == skipped
    assert told == ([3] if skipped else [])
