"""Metrics of a step's groups: rewards, lengths, version lag. numpy only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from spmd_rl.algo.executions import shares_of
from spmd_rl.observe.request_times import request_metrics
from spmd_rl.types.groups import Group, GroupColumns
from spmd_rl.types.samples import FAILURE, NO_VERSION, SampleColumns


def group_metrics(groups: list[Group], version: int | None) -> dict[str, float]:
    """Return the metrics of all samples. `version` is that of the trainer's weights; None where
    nothing is trained, and tokens have no age.

    `reward/solve_none` is the share of groups with no reward above 0, and `reward/solve_all` the
    share with all rewards at 1 or above. Both presume rewards from 0 to 1. Groups without samples
    are counted as failed and are part of no share. `reward/NAME` is the mean of the values that
    the reward function returned as NAME, and `hook/NAME` that of what hooks emitted as NAME.
    `failed/KIND` counts the samples of episodes that failed for a reason of that kind. If there are
    several sources of prompts, `source/NAME/...` are metrics of each. The samples of one execution
    count as one in the mean of rewards and their spread.
    """
    columns = Group.to_columns(groups)
    failed = {
        "reward/failed_samples": float(columns.failed.lengths.sum()),
        "reward/failed_groups": float((columns.lengths == 0).sum()),
    }
    kinds = Counter(known.get(FAILURE) for known in columns.failed.samples.filled("metadata"))
    failed |= {f"failed/{kind}": float(count) for kind, count in kinds.items() if kind}
    samples = columns.samples
    if not len(samples):
        return failed if failed["reward/failed_groups"] else {}
    parts = _means("reward", samples.parts)
    parts.pop("reward/reward", None)
    metrics = failed | parts | _reward_metrics(columns)
    return metrics | {
        "rollout/response_tokens_mean": num_drawn_tokens(samples) / len(samples),
        "rollout/truncated": samples.status.count("truncated") / len(samples),
        **({} if version is None else _version_lags(samples.versions, version)),
        **_by_source(groups),
        **_means("hook", (known.get("metrics", {}) for known in samples.metadata)),
        **request_metrics(samples.metadata),
    }


def num_drawn_tokens(samples: SampleColumns) -> int:
    """Return how many tokens of the samples an engine drew."""
    return int(np.count_nonzero(samples.versions != NO_VERSION))


def _by_source(groups: list[Group]) -> dict[str, float]:
    """Return the metrics of each source of prompts, if there are several in these groups."""
    of_source: dict[str, list[Group]] = {}
    for group in groups:
        of_source.setdefault(group.prompt.source, []).append(group)
    if len(of_source) == 1:
        return {}
    metrics = {}
    for source, own in of_source.items():
        name = f"source/{source or 'unnamed'}"
        metrics[f"{name}/share"] = len(own) / len(groups)
        samples = Group.to_columns(own).samples
        if len(samples):
            metrics[f"{name}/reward"] = float(samples.reward.mean())
            tokens_mean = num_drawn_tokens(samples) / len(samples)
            metrics[f"{name}/response_tokens_mean"] = tokens_mean
    return metrics


def _reward_metrics(columns: GroupColumns) -> dict[str, float]:
    rewards = columns.samples.reward
    firsts = columns.offsets[:-1][columns.lengths > 0]  # of each group that has samples
    mean, std = float(rewards.mean()), float(rewards.std())
    if (columns.samples.execution >= 0).any():
        shares, _ = shares_of(columns)
        mean = float(np.average(rewards, weights=shares))
        std = math.sqrt(np.average((rewards - mean) ** 2, weights=shares))
    metrics = {
        "reward/mean": mean,
        "reward/std": std,
        "reward/solve_none": float(np.logical_and.reduceat(rewards <= 0, firsts).mean()),
        "reward/solve_all": float(np.logical_and.reduceat(rewards >= 1, firsts).mean()),
    }
    if len(firsts) > 1:  # a prompt's samples are alike, so the error is that over the prompts
        means = np.add.reduceat(rewards, firsts) / columns.lengths[columns.lengths > 0]
        metrics["reward/mean_error"] = float(means.std(ddof=1) / math.sqrt(len(means)))
    return metrics


def _version_lags(versions: NDArray[np.int32], version: int) -> dict[str, float]:
    """Return how many versions behind the trainer's weights the tokens of engines were drawn."""
    lag = version - versions[versions != NO_VERSION].astype(np.int64)
    return {
        "version/lag_mean": float(lag.mean()) if lag.size else 0.0,
        "version/lag_max": float(lag.max()) if lag.size else 0.0,
        "version/older_share": float((lag > 0).mean()) if lag.size else 0.0,
    }


def rewards_are_equal(groups: list[Group]) -> bool:
    """Whether every group has one reward for all its samples. False if no group has two samples."""
    columns = Group.to_columns(groups)
    if columns.lengths.max(initial=0) <= 1:
        return False
    rewards = columns.samples.reward
    return bool((rewards == rewards[columns.offsets[columns.of_sample]]).all())


def _means(family: str, samples: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each named value over the samples that have it, as `family/NAME`."""
    values_of: dict[str, list[float]] = {}
    for values in samples:
        for name, value in values.items():
            values_of.setdefault(f"{family}/{name}", []).append(value)
    return {name: fmean(values) for name, values in values_of.items()}
