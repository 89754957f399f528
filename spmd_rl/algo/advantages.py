"""Advantages from the rewards of a group. numpy only.

An estimator is a function `groups -> list of [G] arrays`, one array a group in the order of its samples.
Statistics are taken within the samples of one prompt, never over a batch, so groups may differ in size; one that
skipping has emptied has no advantages.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from spmd_rl.errors import ConfigError, DataError
from spmd_rl.types import Group

EPSILON = 1e-6


def group_advantage(groups: list[Group], *, use_std: bool = True) -> list[NDArray[np.float64]]:
    """GRPO: (r - mean) / (std + 1e-6) with the G - 1 standard deviation; `use_std=False` is Dr.GRPO's half.

    Source: Shao et al. 2024 (GRPO); Liu et al. 2025 (Dr.GRPO, which also packs with `aggregation="const"`).
    """
    return [np.array(_standardised(values) if use_std else values) for values in map(_centred, groups)]


def rloo_advantage(groups: list[Group]) -> list[NDArray[np.float64]]:
    """RLOO: the reward less the mean of the other samples' rewards, G / (G - 1) * (r - mean).

    Source: Ahmadian et al. 2024.
    """
    return [np.array(values) * (len(values) / (len(values) - 1)) for values in map(_centred, groups)]


def _standardised(centred: list[float]) -> list[float]:
    """By the G - 1 standard deviation of values whose mean is zero."""
    if not any(centred):
        return centred
    spread = math.sqrt(math.fsum([value * value for value in centred]) / (len(centred) - 1)) + EPSILON
    return [value / spread for value in centred]


def _centred(group: Group) -> list[float]:
    """Rewards less their mean; plain numbers, since a group is too small for numpy to pay."""
    values = [float(sample.reward) for sample in group.samples]
    if group.skipped and not values:
        return []
    if len(values) < 2:
        raise ConfigError(
            f"prompt {group.prompt.uid} has {len(values)} sample: a group advantage compares the samples of one "
            "prompt, so it needs at least 2 (raise sampling.num_samples)"
        )
    if not all(map(math.isfinite, values)):
        bad = next(index for index, value in enumerate(values) if not math.isfinite(value))
        raise DataError(
            f"prompt {group.prompt.uid}, sample {bad}", f"the reward is {values[bad]}, not a number to learn from"
        )
    # Equal rewards must give exactly zero, which subtracting a rounded mean does not promise.
    if values.count(values[0]) == len(values):
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]
