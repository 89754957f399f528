"""Merge of attention states on NVIDIA GPUs: one program for each query head."""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
# Tuples grow in unrolled loops.
# mypy: disable-error-code="assignment, misc, unreachable"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.runtime.pdl import overlapping, wait


def merge_states_gpu(
    partial: Tensor, log_sum: Tensor, rows: Tensor, out: Tensor, merged_log_sum: Tensor | None
) -> None:
    """Shape: as `merge_states`, with partial and out contiguous. `rows` is read early (`pdl`)."""
    heads, dim = partial.shape[1:]
    merged = log_sum if merged_log_sum is None else merged_log_sum
    _merge[(len(rows), heads)](
        partial, log_sum, rows, out, merged, *log_sum.stride(), *merged.stride(), heads,
        dim, triton.next_power_of_2(dim), rows.shape[1], merged_log_sum is not None,
        num_warps=1, enable_fp_fusion=False, **overlapping(),
    )  # fmt: skip


@triton.jit
def _merge(
    partial, log_sum, rows, out, merged, sum_row, sum_head, merged_row, merged_head, heads,
    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, RANGES: tl.constexpr, WITH_LOG_SUM: tl.constexpr,
) -> None:  # fmt: skip
    """Issue all loads before the first result is used."""
    query, head, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, DIM_BLOCK)
    places, log_sums, parts = (), (), ()
    for i in tl.static_range(RANGES):
        places += (tl.load(rows + query * RANGES + i).to(tl.int64),)
    wait()
    for i in tl.static_range(RANGES):
        at = log_sum + places[i] * sum_row + head * sum_head
        log_sums += (tl.load(at, mask=places[i] >= 0, other=float("-inf")),)
    for i in tl.static_range(RANGES):
        seen = (places[i] >= 0) & (column < DIM)
        parts += (
            tl.load(partial + (places[i] * heads + head) * DIM + column, mask=seen, other=0.0),
        )
    highest = log_sums[0]
    for i in tl.static_range(1, RANGES):
        highest = tl.maximum(highest, log_sums[i])
    total = tl.exp(log_sums[0] - highest)
    values = parts[0].to(tl.float32) * total
    for i in tl.static_range(1, RANGES):
        weight = tl.exp(log_sums[i] - highest)
        values = tl.where(places[i] >= 0, values + parts[i].to(tl.float32) * weight, values)
        total += weight
    tl.store(out + (query * heads + head) * DIM + column, values / total, mask=column < DIM)
    if WITH_LOG_SUM:
        tl.store(merged + query * merged_row + head * merged_head, highest + tl.log(total))
