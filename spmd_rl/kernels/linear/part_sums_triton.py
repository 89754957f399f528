"""Sum of a product's parts on GPUs, in the contract's tree (row_shards.py)."""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.runtime.pdl import overlapping, wait

BLOCK = 1024


def add_parts(parts: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Set `out` to the sum of 2, 4 or 8 parts plus the bias, rounded once.

    Neighbours are added, then neighbours of these sums.
    Shape: parts [P, T, N] fp32 and out [T, N], contiguous; bias [N].
    """
    size = out.numel()
    _add_parts[(triton.cdiv(size, BLOCK),)](
        parts, None if bias is None else bias.contiguous(), out, size, out.shape[1], len(parts),
        BLOCK, **overlapping(),
    )  # fmt: skip


@triton.jit
def _add_parts(parts, bias, out, size, columns, PARTS: tl.constexpr, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    wait()
    total = _two(parts, 0, at, inside, size)
    if PARTS >= 4:
        total += _two(parts, 2, at, inside, size)
    if PARTS == 8:
        total += _two(parts, 4, at, inside, size) + _two(parts, 6, at, inside, size)
    if bias is not None:
        total += tl.load(bias + at % columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _two(parts, first: tl.constexpr, at, inside, size) -> tl.tensor:
    """The sum of two neighbours."""
    apart = tl.cast(size, tl.int64)
    left = parts + apart * first
    own = tl.load(left + at, mask=inside, other=0.0)
    return own + tl.load(left + apart + at, mask=inside, other=0.0)
