"""What a step's groups say of the run: rewards, lengths, version lag. numpy only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean

import numpy as np

from spmd_rl.types.samples import Group


def group_metrics(groups: list[Group], version: int) -> dict[str, float]:
    """Statistics over all samples; `version` is the trainer's, which token versions lag behind.

    `reward/solve_none` is the share of groups with no sample above 0, `reward/solve_all` with every
    sample at 1 or above: both speak of rewards from 0 to 1. Groups that skipping has emptied are
    counted, and in no share. `reward/NAME` is the mean of what reward functions returned as NAME
    beside the reward.
    """
    columns = Group.to_columns(groups)
    skipped = {
        "reward/skipped_samples": float(sum(map(len, columns.skipped))),
        "reward/skipped_groups": float((columns.lengths == 0).sum()),
    }
    samples = columns.samples
    if not len(samples):
        return skipped if skipped["reward/skipped_groups"] else {}
    rewards = samples.reward
    firsts = columns.ends[:-1][columns.lengths > 0]  # of each group that has samples
    lag = version - samples.versions.astype(np.int64)
    found = skipped | _parts(samples.parts)
    return found | {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/solve_none": float(np.logical_and.reduceat(rewards <= 0, firsts).mean()),
        "reward/solve_all": float(np.logical_and.reduceat(rewards >= 1, firsts).mean()),
        "rollout/response_tokens_mean": len(samples.tokens) / len(samples),
        "rollout/truncated": samples.finish.count("length") / len(samples),
        "version/lag_mean": float(lag.mean()) if lag.size else 0.0,
        "version/lag_max": float(lag.max()) if lag.size else 0.0,
    }


def is_flat(groups: list[Group]) -> bool:
    """Whether no sample of any group has another reward than those beside it: nothing to compare."""
    columns = Group.to_columns(groups)
    rewards = columns.samples.reward
    compared = bool(columns.lengths.max(initial=0) > 1)
    return compared and bool(
        (rewards == rewards[np.repeat(columns.ends[:-1], columns.lengths)]).all()
    )


def _parts(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Each mean is over the samples that have the part."""
    found: dict[str, list[float]] = {}
    for one in parts:
        for name, value in one.items():
            found.setdefault(f"reward/{name}", []).append(value)
    found.pop("reward/reward", None)
    return {name: fmean(values) for name, values in found.items()}
