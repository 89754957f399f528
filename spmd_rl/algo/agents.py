"""Agents of one episode: each is compared with itself in the other episodes of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from spmd_rl.algo.algorithm import Advantage
from spmd_rl.types.groups import Group
from spmd_rl.types.samples import AGENT


def compared_by_agent(advantage: Advantage) -> Advantage:
    """Return an estimator that takes the statistics of a group over the samples of one agent.

    `advantage` gives a number for each sample. The agent is named by the sample's metadata; samples
    without a name are of one agent. An agent of a single execution has nothing to compare with, so
    its advantage is 0.
    """

    def by_agent(groups: list[Group]) -> Sequence[NDArray[np.floating]]:
        if not any(map(_has_agents, groups)):
            return advantage(groups)
        parts = [(number, rows) for number, group in enumerate(groups) for rows in _rows(group)]
        several = [one for one in parts if _num_executions(groups[one[0]], one[1]) > 1]
        compared = [
            replace(groups[number], samples=[groups[number].samples[row] for row in rows])
            for number, rows in several
        ]
        values = [np.zeros(group.num_samples) for group in groups]
        for (number, rows), found in zip(several, advantage(compared), strict=True):
            values[number][rows] = found
        return values

    return by_agent


def _has_agents(group: Group) -> bool:
    metadata = Group.to_columns([group]).samples.metadata
    return any(AGENT in known for known in metadata)


def _rows(group: Group) -> list[list[int]]:
    """Return the numbers of the samples of each agent."""
    rows: dict[str, list[int]] = {}
    for number, sample in enumerate(group.samples):
        rows.setdefault(str(sample.metadata.get(AGENT, "")), []).append(number)
    return list(rows.values())


def _num_executions(group: Group, rows: list[int]) -> int:
    executions = [group.samples[row].execution for row in rows]
    return len({one for one in executions if one >= 0}) + executions.count(-1)
