"""GDPO's advantages: the parts of a reward are normalised apart, then added."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from spmd_rl.algo.advantages import EPSILON, group_advantage
from spmd_rl.errors import ConfigError
from spmd_rl.types.groups import Group

WHOLE = "reward"  # the part that other algorithms learn from


def gdpo_advantage(
    groups: list[Group], *, weights: Mapping[str, float] | None = None
) -> list[NDArray[np.float64]]:
    """Return the weighted sum of each part's group advantage, over its deviation in the batch.

    The parts are those that the reward function returned. Without `weights` every part but "reward"
    counts once. The mean over the batch is 0 already, as each group's is.

    Source: Liu et al. 2026 (GDPO).
    Raises: ConfigError for a part that a sample does not have, or rewards without parts.
    """
    weights = weights or dict.fromkeys(_part_names(groups), 1.0)
    total = [np.zeros(group.num_samples) for group in groups]
    for name, weight in weights.items():
        part = group_advantage([_with_part_as_reward(group, name) for group in groups])
        total = [sum_ + weight * values for sum_, values in zip(total, part, strict=True)]
    scale = _deviation(np.concatenate(total)) + EPSILON
    return [values / scale for values in total]


def _part_names(groups: list[Group]) -> list[str]:
    """Return the names of all parts but the whole reward. Raises: ConfigError without any."""
    names = {name for group in groups for sample in group.samples for name in sample.parts}
    if not names - {WHOLE}:
        raise ConfigError(
            "algorithm = 'gdpo' normalises the parts of a reward: the reward function must return "
            'a dict with parts beside "reward"'
        )
    return sorted(names - {WHOLE})


def _with_part_as_reward(group: Group, name: str) -> Group:
    """Return the group with one part as the reward. Raises: ConfigError where a sample lacks it."""
    if missing := [sample for sample in group.samples if name not in sample.parts]:
        has = ", ".join(sorted(missing[0].parts)) or "none"
        raise ConfigError(
            f"reward_weights: prompt {group.prompt.uid}, sample {missing[0].index} has no part "
            f"{name!r} of its reward (it has {has})"
        )
    samples = [sample.replace(reward=sample.parts[name]) for sample in group.samples]
    return replace(group, samples=samples)


def _deviation(values: NDArray[np.float64]) -> float:
    """Return the n - 1 standard deviation of values with a mean of 0."""
    return math.sqrt(math.fsum(values * values) / max(len(values) - 1, 1))
