"""Failures of episodes: how many of a step a run bears."""

from __future__ import annotations

from collections.abc import Sequence

from spmd_rl.environments.config import AgentConfig
from spmd_rl.errors import SpmdError
from spmd_rl.types.failures import told_causes
from spmd_rl.types.groups import Group
from spmd_rl.types.samples import Sample, error_of


def refuse_failures(groups: Sequence[Group], cfg: AgentConfig) -> None:
    """Raise a SpmdError when more of the episodes have failed than `agent.max_failed` allows.

    The groups are those of a step, or of a set of an evaluation.

    Without `agent.kind` nothing is refused.
    """
    failed = [sample for group in groups for sample in group.failed]
    if not cfg.kind or not failed:
        return
    num_episodes = len(failed) + sum(_num_episodes(group.samples) for group in groups)
    if len(failed) > cfg.max_failed * num_episodes:
        raise SpmdError(
            f"{len(failed)} of {num_episodes} episodes have failed, and "
            f"agent.max_failed = {cfg.max_failed:g} is the share that may: "
            + "; ".join(told_causes(map(error_of, failed)))
        )


def _num_episodes(samples: Sequence[Sample]) -> int:
    """Count the episodes of a prompt's samples, of which several may be of one."""
    return len({one.execution if one.execution >= 0 else ("own", one.index) for one in samples})
