"""Rewards that come from a model and not from a reward function. numpy only."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from spmd_rl.algo.packing import pack
from spmd_rl.errors import ContractError
from spmd_rl.types.batch import Batch
from spmd_rl.types.columns import split_at
from spmd_rl.types.groups import Group


def pack_samples(groups: list[Group]) -> Batch:
    """Return the samples of groups as a batch to score: their advantages are 0."""
    return pack(groups, [np.zeros(group.num_samples) for group in groups])


def with_rewards(groups: list[Group], rewards: NDArray[np.floating]) -> list[Group]:
    """Return the groups with these rewards of their samples, in the order of `pack_samples`.

    Raises: ContractError for another number of rewards.
    """
    sizes = [group.num_samples for group in groups]
    if len(rewards) != sum(sizes):
        raise ContractError(f"there are {len(rewards)} rewards for {sum(sizes)} samples")
    by_group = split_at(rewards.tolist(), np.cumsum([0, *sizes]))
    return [
        replace(
            group,
            samples=[
                sample.replace(reward=reward)
                for sample, reward in zip(group.samples, values, strict=True)
            ],
        )
        for group, values in zip(groups, by_group, strict=True)
    ]
