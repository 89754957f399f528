"""Matrix products on NVIDIA GPUs with one ascending chain over K for every output element.

The tile is free: on Hopper, mma.sync and wgmma round alike (measured, docs/numerics.md), so small batches take narrow
tiles and large ones wide tiles, with the same bits. What is not free is the chain: no split of K, ever.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.linear_tiles import Tile, choose_tile

ROW_GROUP = 8


def matmul_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile | None = None) -> None:
    """out = x @ weight.T + bias, accumulated in fp32, with one rounding to out's dtype.

    Shape: out [M, N], x [M, K], weight [N, K], all with contiguous rows; bias [N].
    """
    (m, k), n = x.shape, weight.shape[0]
    if tile is None:
        tile = choose_tile(m, n, k)
    grid = (triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n),)
    _matmul[grid](
        x, weight, weight if bias is None else bias.contiguous(), out, m, n, k, x.stride(0), weight.stride(0), out.stride(0),
        bias is not None, k % tile.k == 0, tile.m, tile.n, tile.k, ROW_GROUP,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["m"])
def _matmul(
    x, weight, bias, out, m, n, k, x_stride, weight_stride, out_stride,
    HAS_BIAS: tl.constexpr, WHOLE_K: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N)
    group = tl.program_id(0) // (GROUP * tiles_n)
    height = min(tiles_m - group * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * tiles_n)
    row = (group * GROUP + within % height) * TILE_M + tl.arange(0, TILE_M)
    column = (within // height) * TILE_N + tl.arange(0, TILE_N)
    depth = tl.arange(0, TILE_K)
    x_at = x + (row % m).to(tl.int64)[:, None] * x_stride + depth[None, :]
    weight_at = weight + (column % n).to(tl.int64)[None, :] * weight_stride + depth[:, None]
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(0, k, TILE_K):
        if WHOLE_K:
            a, b = tl.load(x_at), tl.load(weight_at)
        else:
            a = tl.load(x_at, mask=(depth < k - start)[None, :], other=0.0)
            b = tl.load(weight_at, mask=(depth < k - start)[:, None], other=0.0)
        total = tl.dot(a, b, total)
        x_at += TILE_K
        weight_at += TILE_K
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    at = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(row < m)[:, None] & (column < n)[None, :])
