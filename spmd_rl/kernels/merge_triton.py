"""Merging ranges of keys on NVIDIA GPUs: a program for each query head, the same for trainer and engine."""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.overlap_triton import overlapping, wait


def merge_ranges_gpu(
    partial: Tensor, log_sum: Tensor, rows: Tensor, out: Tensor, merged_log_sum: Tensor | None
) -> None:
    """Shape: as `merge_ranges`; partial and out contiguous."""
    heads, dim = partial.shape[1:]
    merged = log_sum if merged_log_sum is None else merged_log_sum
    _merge[(len(rows), heads)](
        partial, log_sum, rows, out, merged, *log_sum.stride(), *merged.stride(), heads,
        dim, triton.next_power_of_2(dim), rows.shape[1], triton.next_power_of_2(rows.shape[1]),
        merged_log_sum is not None, num_warps=1, enable_fp_fusion=False, **overlapping(),
    )  # fmt: skip


@triton.jit
def _merge(
    partial, log_sum, rows, out, merged, sum_row, sum_head, merged_row, merged_head, heads,
    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, RANGES: tl.constexpr, RANGE_BLOCK: tl.constexpr,
    WITH_LOG_SUM: tl.constexpr,
) -> None:  # fmt: skip
    query, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    which, column = tl.arange(0, RANGE_BLOCK), tl.arange(0, DIM_BLOCK)
    place = tl.load(rows + query * RANGES + which, mask=which < RANGES, other=-1).to(tl.int64)  # made early
    wait()
    log_sums = tl.load(log_sum + place * sum_row + head * sum_head, mask=place >= 0, other=float("-inf"))
    highest = tl.max(log_sums, 0)
    weights = tl.exp(log_sums - highest)
    values = tl.zeros([DIM_BLOCK], dtype=tl.float32)
    total = 0.0
    for i in tl.static_range(RANGES):
        chosen = which == i
        row = tl.sum(tl.where(chosen, place, 0), 0)
        weight = tl.sum(tl.where(chosen, weights, 0.0), 0)
        seen = (row >= 0) & (column < DIM)
        part = tl.load(partial + (row * heads + head) * DIM + column, mask=seen, other=0.0).to(tl.float32) * weight
        values = part if i == 0 else tl.where(row >= 0, values + part, values)
        total += weight
    tl.store(out + (query * heads + head) * DIM + column, values / total, mask=column < DIM)
    if WITH_LOG_SUM:
        tl.store(merged + query * merged_row + head * merged_head, highest + tl.log(total))
