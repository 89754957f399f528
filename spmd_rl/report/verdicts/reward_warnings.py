"""Warnings about rewards: no differences to learn from, or no progress. Each is given once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from spmd_rl.report.means import Mean

FIRST_STEPS = 3  # steps without any difference in reward at the start of a run that give a warning
FLAT_STEPS = 20  # the same, in a row, later in the run
MOVING_STEPS = 50  # the steps whose two halves are compared
SOLVED_REWARD = 0.9  # mean from which a run whose rewards are from 0 to 1 has solved its prompts
PAGE = "docs/hyperparameters.md"


class RewardWarnings:
    """Watches the rewards of a run, and warns when it cannot learn from them."""

    def __init__(self, settings: Mapping[str, Any], samples: Path) -> None:
        """`settings` are those of the run's TOML; `samples` is the folder of its samples."""
        self._settings = settings
        self._samples = samples
        self._rewards: list[float] = []
        self._num_flat = 0
        self._differed = False  # in any step so far

    def after_step(self, mean_reward: float, all_equal: bool) -> Iterator[str]:
        """Yield the warnings after a step.

        `all_equal` says that each prompt's samples have the same reward.
        """
        self._rewards.append(mean_reward)
        self._num_flat = self._num_flat + 1 if all_equal else 0
        self._differed = self._differed or not all_equal
        if self._num_flat == (FLAT_STEPS if self._differed else FIRST_STEPS):
            yield self._flat_warning()
        is_time = len(self._rewards) == MOVING_STEPS and self._differed
        if is_time and not moved(self._rewards) and not self._is_solved(MOVING_STEPS):
            yield self._standstill_warning()

    def _is_solved(self, num_steps: int) -> bool:
        """Whether almost all samples of the last steps had the highest reward, if that is 1."""
        if min(self._rewards) < 0 or max(self._rewards) > 1:
            return False
        return fmean(self._rewards[-num_steps:]) >= SOLVED_REWARD

    def _flat_warning(self) -> str:
        flat = (
            f"in {self._num_flat} steps, all samples of every prompt had the same reward, so "
            "nothing was learned"
        )
        if self._is_solved(self._num_flat):
            mean = fmean(self._rewards[-self._num_flat :])
            return f"{flat}: the mean is {mean:.3g}, so take harder prompts ({PAGE})"
        return (
            f"{flat}: look at the samples in {self._samples}, and at "
            f"{self._named('reward', 'sampling.max_tokens', 'sampling.temperature')} ({PAGE})"
        )

    def _standstill_warning(self) -> str:
        half = MOVING_STEPS // 2
        return (
            f"in the last {MOVING_STEPS} steps, the mean reward has not changed by more than its "
            f"noise (from {fmean(self._rewards[:half]):.4g} to {fmean(self._rewards[half:]):.4g}): "
            "look at "
            f"{self._named('trainer.lr', 'sampling.max_tokens', 'prompts_per_step')} ({PAGE})"
        )

    def _named(self, *keys: str) -> str:
        """Return the settings with their values, without those that the recipe does not have."""
        found = [
            f"{key} = {value}" for key in keys if (value := _value(self._settings, key)) is not None
        ]
        return ", ".join(found) or "the recipe's settings"


def moved(rewards: Sequence[float]) -> bool:
    """Whether the means of the two halves differ by more than their noise."""
    half = len(rewards) // 2
    before, after = (
        Mean(fmean(part), (variance(part) / len(part)) ** 0.5)
        for part in (rewards[:half], rewards[half:])
    )
    return after.differs(before)


def _value(settings: Mapping[str, Any], key: str) -> Any:
    """Return the value of `a.b` in nested tables, None if there is no such key."""
    found: Any = settings
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
