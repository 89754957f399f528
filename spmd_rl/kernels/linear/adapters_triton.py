"""What low-rank adapters add to a product, on NVIDIA GPUs, in one kernel.

Each element has one ascending chain over the rank, as in `triton_gemm`, so the tile is free.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.runtime.pdl import overlapping, wait

WGMMA_K = 16
MOST_PARTS = 3


class AdapterTile(NamedTuple):
    """Rows and columns of the product that a program adds to."""

    m: int
    n: int
    warps: int


# by the least number of rows that takes it
TILES = {
    0: AdapterTile(16, 64, 4),
    17: AdapterTile(32, 64, 4),
    33: AdapterTile(64, 64, 4),
    1024: AdapterTile(128, 128, 8),
}


def add_low_rank(
    product: Tensor, low: Tensor, up: Tensor, scale: float, widths: Sequence[int]
) -> None:
    """Add to each part of `product` what its adapter makes of `low`, in place.

    The roundings to bf16 are of `low` scaled, of its product with `up`, and of the sum.
    Shape: product [T, N] and low [T, P R] with contiguous rows, up [N, R]; `widths` are the P
    columns of the parts, which together are N.
    """
    num_rows, rank = len(product), up.shape[1]
    tile = next(tile for least, tile in reversed(TILES.items()) if num_rows >= least)
    whole = len(widths) <= MOST_PARTS and all(end % tile.n == 0 for end in accumulate(widths[:-1]))
    if whole:
        _launch(product, low, up, scale, widths, tile)
        return
    parts = zip(
        product.split(list(widths), 1), low.split(rank, 1), up.split(list(widths)), strict=True
    )
    for part, own_low, own_up in parts:
        _launch(part, own_low, own_up, scale, (part.shape[1],), tile)


def _launch(
    product: Tensor, low: Tensor, up: Tensor, scale: float, widths: Sequence[int], tile: AdapterTile
) -> None:
    (num_rows, columns), rank = product.shape, up.shape[1]
    ends = [*accumulate(widths), *[columns] * MOST_PARTS]
    step = min(max(triton.next_power_of_2(rank), WGMMA_K), 64)
    grid = (triton.cdiv(num_rows, tile.m), triton.cdiv(columns, tile.n))
    _add_low_rank[grid](
        product, low, up, scale, num_rows, columns, ends[0], ends[1],
        product.stride(0), low.stride(0), rank, tile.m, tile.n, step,
        num_warps=tile.warps, enable_fp_fusion=False, **overlapping(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["scale", "num_rows"])
def _add_low_rank(
    product, low, up, scale, num_rows, columns, first_end, second_end, product_stride, low_stride,
    RANK: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
) -> None:  # fmt: skip
    first_column = tl.program_id(1) * TILE_N
    row = tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    column = first_column + tl.arange(0, TILE_N)
    part = (first_column >= first_end).to(tl.int32) + (first_column >= second_end).to(tl.int32)
    is_row, is_column = row < num_rows, column < columns
    own_low = low + part * RANK
    wait()
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in tl.static_range(0, RANK, TILE_K):
        k = start + tl.arange(0, TILE_K)
        a = tl.load(
            own_low + row[:, None] * low_stride + k[None, :],
            mask=is_row[:, None] & (k < RANK)[None, :], other=0.0,
        )  # fmt: skip
        b = tl.load(
            up + column.to(tl.int64)[:, None] * RANK + k[None, :],
            mask=is_column[:, None] & (k < RANK)[None, :], other=0.0,
        )  # fmt: skip
        a = (a.to(tl.float32) * scale).to(low.dtype.element_ty)
        total = tl.dot(a, tl.trans(b), total)
    added = total.to(product.dtype.element_ty).to(tl.float32)
    at = product + row[:, None] * product_stride + column[None, :]
    inside = is_row[:, None] & is_column[None, :]
    own = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (own + added).to(product.dtype.element_ty), mask=inside)
