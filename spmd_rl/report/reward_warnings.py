"""Tells, once each, that nothing can be learned from a run's samples, and that its reward has not
moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, variance
from typing import Any

FIRST_STEPS = 3  # of a run, without a difference in reward, are told
FLAT_STEPS = 20  # as many in a row later on
MOVING_STEPS = 50  # whose halves are compared
ERRORS = 2.0  # standard errors that the halves' means must differ by to count as another reward
PAGE = "docs/hyperparameters.md"


class RewardWarnings:
    """Takes each step's mean reward, and whether all samples of every prompt had the same one."""

    def __init__(self, settings: Mapping[str, Any], samples: Path) -> None:
        """`settings` are the run's, as its TOML has them; the samples lie in the folder `samples`."""
        self._settings = settings
        self._samples = samples
        self._rewards: list[float] = []
        self._num_flat = 0
        self._differed = False  # in any step so far

    def take(self, reward: float, flat: bool) -> Iterator[str]:
        """What there is to tell after this step."""
        self._rewards.append(reward)
        self._num_flat = self._num_flat + 1 if flat else 0
        self._differed = self._differed or not flat
        if self._num_flat == (FLAT_STEPS if self._differed else FIRST_STEPS):
            yield (
                f"{self._num_flat} steps in which all samples of every prompt had the same reward: group advantages "
                f"are 0, and nothing is learned ({self._samples} shows them); look at "
                f"{self._named('reward', 'sampling.max_tokens', 'sampling.temperature')} ({PAGE})"
            )
        if len(self._rewards) == MOVING_STEPS and self._differed and not moved(self._rewards):
            half = MOVING_STEPS // 2
            yield (
                f"in {MOVING_STEPS} steps the mean reward has not changed by more than its noise "
                f"({fmean(self._rewards[:half]):.4g}, then {fmean(self._rewards[half:]):.4g}); look at "
                f"{self._named('trainer.lr', 'sampling.max_tokens', 'prompts_per_step')} ({PAGE})"
            )

    def _named(self, *keys: str) -> str:
        """The settings with their values; a recipe of one's own need not have them all."""
        found = [
            f"{key} = {value}" for key in keys if (value := _value(self._settings, key)) is not None
        ]
        return ", ".join(found) or "the recipe's settings"


def moved(rewards: Sequence[float]) -> bool:
    """Whether the mean of the later half differs from that of the earlier one by more than chance
    explains.
    """
    half = len(rewards) // 2
    before, after = rewards[:half], rewards[half:]
    error = (variance(before) / len(before) + variance(after) / len(after)) ** 0.5
    return abs(fmean(after) - fmean(before)) > ERRORS * error


def _value(settings: Mapping[str, Any], key: str) -> Any:
    """`a.b` of nested tables; None where there is no such key."""
    found: Any = settings
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
