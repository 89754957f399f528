"""Correction weights whose mean over a batch is 1. numpy only."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from spmd_rl.algo.config import CorrectionMode, Level
from spmd_rl.algo.policy.corrections import MAX_LOG_RATIO, correction_weights
from spmd_rl.types.batch import Batch


def with_mean_weight_of_one(
    batch: Batch, *, mode: CorrectionMode, level: Level, high: float, low: float | None = None
) -> Batch:
    """Return the batch with its advantages over the mean of the weights that correct its tokens.

    A surrogate is proportional to its advantage. So this is the loss with weights over their mean,
    which is taken over all tokens in the mask, those of weight 0 included. A mean of 0 changes
    nothing. The batch has the column "old_logprobs".
    Source: verl's `rollout_is_batch_normalize`.
    """
    weights = correction_weights(_ratios(batch, level), mode, high=high, low=low)
    mean = float(weights.mean()) if len(weights) else 0.0
    return replace(batch, advantages=batch.advantages / np.float32(mean)) if mean else batch


def _ratios(batch: Batch, level: Level) -> NDArray[np.float64]:
    """Return the ratio trainer / engine of each token in the mask, or of its sequence."""
    old = batch.columns["old_logprobs"][batch.mask].astype(np.float64)
    log_ratio = old - batch.rollout_logprobs[batch.mask]
    if level != "token":
        owner = np.repeat(np.arange(batch.num_sequences), batch.lengths)[batch.mask]
        sums = np.bincount(owner, log_ratio).astype(np.float64)  # numpy's types say int
        if level == "geometric":
            sums /= np.maximum(np.bincount(owner), 1)
        log_ratio = sums[owner]
    return np.exp(log_ratio.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))
