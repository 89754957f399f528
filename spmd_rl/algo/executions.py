"""Executions: runs of a prompt, each of which may have made several samples. numpy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spmd_rl.types.groups import GroupColumns


def executions_of(columns: GroupColumns) -> NDArray[np.int64]:
    """Number the executions of all groups, and return that of each sample. Shape: [N]."""
    samples = columns.samples
    own = -1 - np.arange(len(samples))  # of a sample that is an execution of its own
    if (samples.execution < 0).all():
        return np.arange(len(samples))
    within = np.where(samples.execution < 0, own, samples.execution)
    keys = np.stack([columns.of_sample, within], axis=1)
    return np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)


def shares_of(columns: GroupColumns) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return how much each sample counts in its group, and how many executions each group has.

    The samples of one execution count as one together. Shape: [N] and [groups].
    """
    execution = executions_of(columns)
    group_of_execution = np.zeros(execution.max(initial=-1) + 1, np.int64)
    group_of_execution[execution] = columns.of_sample
    share = 1.0 / np.bincount(execution)[execution]
    return share, np.bincount(group_of_execution, minlength=len(columns.lengths))
