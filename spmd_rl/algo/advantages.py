"""Advantages from the rewards of a group. numpy only.

An estimator maps groups to a list of [G] arrays: one array a group, in the order of its samples.
Statistics are taken over the samples of one prompt, never over a batch, so groups may differ in
size. The samples of one execution, such as an episode's, count as one together. A group all of
whose samples failed has no advantages.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from spmd_rl.algo.executions import shares_of
from spmd_rl.errors import ConfigError, DataError
from spmd_rl.types.columns import split_at
from spmd_rl.types.groups import Group, GroupColumns

EPSILON = 1e-6


def group_advantage(groups: list[Group], *, use_std: bool = True) -> list[NDArray[np.float64]]:
    """Return GRPO's advantages: (r - mean) / (std + 1e-6), with the G - 1 standard deviation.

    G is the number of executions, which is that of samples unless a hook made several at once.

    Dr.GRPO takes `use_std=False` here and packs with `aggregation="const"`.

    Source: Shao et al. 2024 (GRPO); Liu et al. 2025 (Dr.GRPO).
    """
    columns = Group.to_columns(groups)
    share, num_executions = shares_of(columns)
    centred = _centred(columns, share, num_executions)
    if not use_std:
        return split_at(centred, columns.offsets)
    variance = _group_sums(share * centred * centred, columns) / _num_others(num_executions)
    scale = np.sqrt(variance) + EPSILON
    return split_at(centred / np.repeat(scale, columns.lengths), columns.offsets)


def rloo_advantage(groups: list[Group]) -> list[NDArray[np.float64]]:
    """Return RLOO's advantages: the reward less the mean reward of the group's other samples.

    That is G / (G - 1) * (r - mean).

    Source: Ahmadian et al. 2024.
    """
    columns = Group.to_columns(groups)
    share, num_executions = shares_of(columns)
    factor = np.repeat(num_executions / _num_others(num_executions), columns.lengths)
    return split_at(_centred(columns, share, num_executions) * factor, columns.offsets)


def task_rewards(groups: list[Group]) -> list[NDArray[np.float64]]:
    """Return the rewards themselves, for an algorithm that gives them to tokens in its credit.

    Raises: DataError for a reward that is not finite.
    """
    columns = Group.to_columns(groups)
    _check_rewards(columns)
    return split_at(columns.samples.reward, columns.offsets)


def _centred(
    columns: GroupColumns, share: NDArray[np.float64], num_executions: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the rewards less the mean of their group."""
    _check(columns)
    rewards, sizes = columns.samples.reward, columns.lengths
    means = _group_sums(share * rewards, columns) / np.maximum(num_executions, 1)
    centred = rewards - np.repeat(means, sizes)
    # Equal rewards must give exactly zero, which subtracting a rounded mean does not promise.
    group = columns.of_sample
    differs = rewards != rewards[columns.offsets[group]]
    return np.where(np.bincount(group, differs, len(sizes))[group] > 0, centred, 0.0)


def _group_sums(values: NDArray[np.float64], columns: GroupColumns) -> NDArray[np.float64]:
    """Return the exact sum of each group, rounded once."""
    return np.array([*map(math.fsum, split_at(values.tolist(), columns.offsets))])


def _num_others(num_executions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many others each of a group's executions has; 1 where there are none."""
    return np.maximum(num_executions - 1, 1)


def _check(columns: GroupColumns) -> None:
    _check_sizes(columns)
    _check_rewards(columns)


def _check_sizes(columns: GroupColumns) -> None:
    """Raises: ConfigError for a group of one sample, which has none to compare with."""
    sizes = columns.lengths.tolist()
    for uid, size, num_failed in zip(
        columns.prompts.uid.tolist(), sizes, columns.failed.lengths.tolist(), strict=True
    ):
        if size < 2 and not (num_failed and size == 0):
            raise ConfigError(
                f"prompt {uid} has {size} sample, but a group advantage compares the samples of "
                "one prompt: set sampling.num_samples to 2 or more"
            )


def _check_rewards(columns: GroupColumns) -> None:
    """Raises: DataError for the first reward that is not finite."""
    finite = np.isfinite(columns.samples.reward)
    if not finite.all():
        bad = int(finite.argmin())
        group = int(np.searchsorted(columns.offsets, bad, side="right")) - 1
        raise DataError(
            f"prompt {columns.prompts.uid[group]}, sample {bad - columns.offsets[group]}",
            f"the reward is {columns.samples.reward[bad]}: it must be a finite number",
        )
