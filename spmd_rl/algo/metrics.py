"""What a step's groups say of the run: rewards, lengths, version lag. numpy only."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from spmd_rl.types import Group


def group_metrics(groups: list[Group], version: int) -> dict[str, float]:
    """Statistics over all samples; `version` is the trainer's, which token versions lag behind.

    `reward/solve_none` is the share of groups with no sample above 0, `reward/solve_all` with every sample at 1
    or above. Groups that skipping has emptied are counted, and in no share.
    """
    skipped = {
        "reward/skipped_samples": float(sum(len(group.skipped) for group in groups)),
        "reward/skipped_groups": float(sum(not group.samples for group in groups)),
    }
    groups = [group for group in groups if group.samples]
    if not groups:
        return skipped if skipped["reward/skipped_groups"] else {}
    samples = [sample for group in groups for sample in group.samples]
    rewards = np.array([sample.reward for sample in samples], dtype=np.float64)
    firsts = [0, *accumulate(len(group.samples) for group in groups[:-1])]  # of each group
    lag = version - np.concatenate([sample.versions for sample in samples]).astype(np.int64)
    return skipped | {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/solve_none": float(np.logical_and.reduceat(rewards <= 0, firsts).mean()),
        "reward/solve_all": float(np.logical_and.reduceat(rewards >= 1, firsts).mean()),
        "rollout/response_tokens_mean": sum(len(sample.tokens) for sample in samples) / len(samples),
        "rollout/truncated": sum(sample.finish == "length" for sample in samples) / len(samples),
        "version/lag_mean": float(lag.mean()) if lag.size else 0.0,
        "version/lag_max": float(lag.max()) if lag.size else 0.0,
    }
