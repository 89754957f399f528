"""A run without a signal, or without progress, gets one warning that names settings."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from random import Random

import pytest

from spmd_rl.report.verdicts.reward_warnings import FLAT_STEPS, MOVING_STEPS, RewardWarnings, moved

SETTINGS = {
    "reward": "r.py:f",
    "trainer": {"lr": 1e-6},
    "sampling": {"max_tokens": 128, "temperature": 1.0},
}
FLAT, STILL = (
    "all samples of every prompt had the same reward",
    "has not changed by more than its noise",
)


def told(steps: Iterable[tuple[float, bool]], settings: dict[str, object] = SETTINGS) -> list[str]:
    watch = RewardWarnings(settings, Path("runs/x/samples"))
    return [hint for reward, flat in steps for hint in watch.after_step(reward, flat)]


def noisy(rise: float, num_steps: int = 2 * MOVING_STEPS) -> list[tuple[float, bool]]:
    """Mean rewards that scatter by 0.05 and rise by `rise` in each step."""
    random = Random(0)
    return [(0.3 + rise * step + random.gauss(0, 0.05), False) for step in range(num_steps)]


def test_a_reward_that_does_not_move_is_told_once() -> None:
    (hint,) = told(noisy(0.0))
    assert STILL in hint
    assert "trainer.lr = 1e-06, sampling.max_tokens = 128" in hint
    assert "prompts_per_step" not in hint, "this recipe has no such setting"


def test_the_same_reward_in_every_step_is_told() -> None:
    (hint,) = told([(0.5, False)] * MOVING_STEPS)
    assert "(from 0.5 to 0.5)" in hint


@pytest.mark.parametrize("steps", [noisy(0.005), noisy(-0.005), noisy(0.0, MOVING_STEPS - 1)])
def test_a_reward_that_moves_or_is_young_is_not_told(steps: list[tuple[float, bool]]) -> None:
    assert told(steps) == []


def test_later_steps_without_a_signal_are_told_once_they_are_many() -> None:
    learned = [(0.1, False), (0.9, False)]
    assert told([*learned, *[(1.0, True)] * (FLAT_STEPS - 1)]) == []
    (hint,) = told([*learned, *[(0.5, True)] * (FLAT_STEPS + 5)])
    assert hint.startswith(f"in {FLAT_STEPS} steps, {FLAT}")
    assert "reward = r.py:f, sampling.max_tokens = 128, sampling.temperature = 1.0" in hint


def test_a_run_that_never_has_a_signal_is_told_at_once_and_no_more() -> None:
    (hint,) = told([(0.0, True)] * 2 * MOVING_STEPS)
    assert hint.startswith(f"in 3 steps, {FLAT}")


def test_a_run_that_is_solved_is_told_to_take_harder_prompts() -> None:
    learned = [(0.1, False), (0.9, False)]
    (hint,) = told([*learned, *[(0.98, True)] * FLAT_STEPS])
    assert hint.endswith("the mean is 0.98, so take harder prompts (docs/hyperparameters.md)")
    assert told([(0.95, False)] * MOVING_STEPS) == [], "it stands still at its top"
    (hint,) = told([(9.0, True)] * 3)
    assert "look at the samples" in hint, "nobody knows the highest of such rewards"


def test_a_recipe_without_these_settings() -> None:
    (hint,) = told([(0.0, True)] * 3, {})
    assert "and at the recipe's settings" in hint


def test_what_moves() -> None:
    assert moved([0.0, 0.1] * 5 + [0.5, 0.6] * 5)
    assert not moved([0.0, 0.5] * 10)
