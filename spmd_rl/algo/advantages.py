"""Advantages from the rewards of a group. numpy only.

An estimator is a function `groups -> list of [G] arrays`, one array a group in the order of its
samples. Statistics are taken within the samples of one prompt, never over a batch, so groups may
differ in size; one that skipping has emptied has no advantages.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from spmd_rl.errors import ConfigError, DataError
from spmd_rl.types.columns import pieces
from spmd_rl.types.samples import Group, GroupColumns

EPSILON = 1e-6


def group_advantage(groups: list[Group], *, use_std: bool = True) -> list[NDArray[np.float64]]:
    """GRPO: (r - mean) / (std + 1e-6) with the G - 1 standard deviation; `use_std=False` is
    Dr.GRPO's half.

    Source: Shao et al. 2024 (GRPO); Liu et al. 2025 (Dr.GRPO, which also packs with
    `aggregation="const"`).
    """
    columns = Group.to_columns(groups)
    centred = _centred(columns)
    if not use_std:
        return pieces(centred, columns.ends)
    spread = np.sqrt(_sums(centred * centred, columns) / _others(columns)) + EPSILON
    return pieces(centred / np.repeat(spread, columns.lengths), columns.ends)


def rloo_advantage(groups: list[Group]) -> list[NDArray[np.float64]]:
    """RLOO: the reward less the mean of the other samples' rewards, G / (G - 1) * (r - mean).

    Source: Ahmadian et al. 2024.
    """
    columns = Group.to_columns(groups)
    factor = columns.lengths / _others(columns)
    return pieces(_centred(columns) * np.repeat(factor, columns.lengths), columns.ends)


def _centred(columns: GroupColumns) -> NDArray[np.float64]:
    """Rewards less the mean of their group."""
    _check(columns)
    rewards, sizes = columns.samples.reward, columns.lengths
    centred = rewards - np.repeat(_sums(rewards, columns) / np.maximum(sizes, 1), sizes)
    # Equal rewards must give exactly zero, which subtracting a rounded mean does not promise.
    other = rewards != rewards[np.repeat(columns.ends[:-1], sizes)]
    group = np.repeat(np.arange(len(sizes)), sizes)
    return np.where(np.bincount(group, other, len(sizes))[group] > 0, centred, 0.0)


def _sums(values: NDArray[np.float64], columns: GroupColumns) -> NDArray[np.float64]:
    """Of each group, rounded once."""
    return np.array([*map(math.fsum, pieces(values.tolist(), columns.ends))])


def _others(columns: GroupColumns) -> NDArray[np.int64]:
    """How many samples each sample of a group is compared with; 1 where there are none."""
    return np.maximum(columns.lengths - 1, 1)


def _check(columns: GroupColumns) -> None:
    sizes = columns.lengths.tolist()
    for uid, size, skipped in zip(
        columns.prompts.uid.tolist(), sizes, columns.skipped, strict=True
    ):
        if size < 2 and not (skipped and size == 0):
            raise ConfigError(
                f"prompt {uid} has {size} sample: a group advantage compares the samples of one "
                "prompt, so it needs at least 2 (raise sampling.num_samples)"
            )
    finite = np.isfinite(columns.samples.reward)
    if not finite.all():
        bad = int(finite.argmin())
        group = int(np.searchsorted(columns.ends, bad, side="right")) - 1
        raise DataError(
            f"prompt {columns.prompts.uid[group]}, sample {bad - columns.ends[group]}",
            f"the reward is {columns.samples.reward[bad]}, not a number to learn from",
        )
