"""Write of keys and values into pages on NVIDIA GPUs, in one kernel."""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.low_precision.kv_codes import KvCoding
from spmd_rl.kernels.low_precision.kv_codes_triton import stored
from spmd_rl.kernels.runtime.padding import dense_heads
from spmd_rl.kernels.runtime.pdl import overlapping, wait


def write_rows(
    keys: Tensor,
    values: Tensor | None,
    slots: Tensor,
    k: Tensor,
    v: Tensor,
    coding: KvCoding | None,
) -> None:
    """Write no values where no memory of them is given. Shape: as `kv_write.write_kv`."""
    k, v = dense_heads(k), dense_heads(v)
    width = k.shape[1] * k.shape[2]
    _write[(len(slots),)](
        keys, values, slots, k, v, *scales_and_counts(coding), k.stride(0), v.stride(0), width,
        triton.next_power_of_2(width), num_warps=4, **overlapping(),
    )  # fmt: skip


def scales_and_counts(coding: KvCoding | None) -> tuple[float, float, Tensor | None]:
    """Return what a kernel that writes codes takes: the scales of keys and values, and counts."""
    if coding is None:
        return 1.0, 1.0, None
    of_keys, of_values = coding.exponents
    return 2.0**of_keys, 2.0**of_values, coding.counts


@triton.jit
def _write(
    keys, values, slots, k, v, k_scale, v_scale, counts, k_stride, v_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    wait()
    slot = tl.load(slots + token).to(tl.int64)
    inside = (column < WIDTH) & (slot >= 0)
    key = tl.load(k + token * k_stride + column, mask=inside, other=0.0)
    if counts is not None:
        tl.atomic_add(counts, 2 * WIDTH, mask=slot >= 0, sem="relaxed")
    tl.store(keys + slot * WIDTH + column, stored(key, k_scale, counts, keys), mask=inside)
    if values is not None:
        value = tl.load(v + token * v_stride + column, mask=inside, other=0.0)
        value = stored(value, v_scale, counts, values)
        tl.store(values + slot * WIDTH + column, value, mask=inside)
