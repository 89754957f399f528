"""Merge of attention over several ranges of keys, weighted by their softmax denominators.

Weights and sums are float32 with one rounding at the end. Ranges are added from first to last. The
result of a single range is returned unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_states(
    partial: Tensor,
    log_sum: Tensor,
    rows: Tensor,
    out: Tensor,
    merged_log_sum: Tensor | None = None,
) -> None:
    """Write each query's attention over all its ranges to `out`.

    `log_sum` holds the logs of the ranges' softmax denominators. `merged_log_sum` receives those of
    all ranges together, if it is given.
    Shape: partial [P, H, D], log_sum [P, H] fp32. rows [T, N] says where the results of a query's
    ranges lie, -1 for none; the first range is always there. out [T, H, D], merged_log_sum [T, H]
    fp32.
    """
    if partial.is_cuda:
        from spmd_rl.kernels.attention.merge_states_triton import merge_states_gpu

        merge_states_gpu(partial, log_sum, rows, out, merged_log_sum)
        return
    present = (rows >= 0).unsqueeze(-1)
    log_sums = log_sum[rows.clamp(min=0)].masked_fill(~present, -torch.inf)
    highest = log_sums.amax(1)
    weights = (log_sums - highest.unsqueeze(1)).exp()
    total, values = weights[:, 0], partial[rows[:, 0]].float() * weights[:, 0].unsqueeze(-1)
    for i in range(1, rows.shape[1]):
        more = values + partial[rows[:, i].clamp(min=0)].float() * weights[:, i].unsqueeze(-1)
        total, values = (
            total + weights[:, i],
            torch.where(present[:, i].unsqueeze(-1), more, values),
        )
    out.copy_(values / total.unsqueeze(-1))
    if merged_log_sum is not None:
        merged_log_sum.copy_(highest + total.log())
