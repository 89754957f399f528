"""Grouped GEMMs on NVIDIA GPUs: the rows of each expert times that expert's weight, in one launch.

Every output element has one ascending chain over K, as in `linear/triton_gemm.py`. So the tile is
free, and a row's bits depend on no other row and on no number of rows. Weights are found by their
addresses, so each may be a tensor of its own. The device knows the tiles (`order_triton.py`), and
programs beyond the last one end at once, so nothing waits for the host.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.moe.expert_addresses import Addresses
from spmd_rl.kernels.moe.grouped_tiles import GradTile, GroupedTile
from spmd_rl.kernels.moe.order_triton import DeviceOrder
from spmd_rl.kernels.rowwise.activation_triton import silu_times
from spmd_rl.kernels.runtime.pdl import overlapping, wait


def grouped_matmul(
    x: Tensor,
    weights: Addresses,
    order: DeviceOrder,
    tile: GroupedTile,
    *,
    gathers: bool = False,
    gated: bool = False,
    scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return each row times the weights of its expert, rounded once to x's dtype or to `dtype`.

    With `gathers`, row r is that of the token of slot r, else row r of x. If `gated`, the two parts
    of the weights are rounded, and the result is SiLU(first) * second. `scales` multiply the fp32
    sums. Rows that no expert has are not set.
    Shape: x [T, C] or [S, C], weights of P parts [N, C], scales [T K] fp32 by slot; returns
    [S, P N], or if gated [S, N]. Raises: ValueError for another tile than that of the order.
    """
    check_tile(tile, order)
    parts, (n, k) = weights.num_parts, weights.shape
    out = x.new_empty(order.num_slots, n if gated else parts * n, dtype=dtype)
    columns = triton.cdiv(n, tile.n) * (1 if gated else parts)
    _grouped[(order.max_tiles * columns,)](
        x, weights.table, out, order.slots, order.starts, order.tiles,
        out if scales is None else scales, k, n, x.stride(0), order.max_tiles, weights.num_experts,
        1 if gated else parts, 1, order.experts_per_token, gathers, scales is not None, gated,
        False, weights.is_aligned, n % tile.n == 0, k % tile.k == 0, tile.swap,
        order.is_one_token, tile.m, tile.n, tile.k, tile.group,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False, **overlapping(),
    )  # fmt: skip
    return out


def grouped_matmul_turned(
    grad: Tensor,
    weights: Addresses,
    order: DeviceOrder,
    tile: GroupedTile,
    *,
    gathers: bool = False,
) -> Tensor:
    """Return each row times the transposed weights of its expert: the gradient of the rows.

    The parts of the weights are added in one chain.
    Shape: grad [S, P N], or with `gathers` [T, P N], weights of P parts [N, C]; returns [S, C].
    """
    check_tile(tile, order)
    parts, (n, k) = weights.num_parts, weights.shape
    out = grad.new_empty(order.num_slots, k)
    _grouped[(order.max_tiles * triton.cdiv(k, tile.n),)](
        grad, weights.table, out, order.slots, order.starts, order.tiles, out,
        n, k, grad.stride(0), order.max_tiles, weights.num_experts,
        1, parts, order.experts_per_token, gathers, False, False, True,
        weights.is_aligned, k % tile.n == 0, n % tile.k == 0, False,
        order.is_one_token, tile.m, tile.n, tile.k, tile.group,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def grouped_outer(
    grad: Tensor,
    x: Tensor,
    order: DeviceOrder,
    tile: GradTile,
    *,
    gathers_grad: bool = False,
    gathers_x: bool = False,
) -> Tensor:
    """Return for each expert the sum over its rows of grad and x: the gradient of its weight.

    Rows are added in the order of tokens, in one chain. An expert without rows has zeros.
    Shape: grad [S, N] and x [S, C], or [T, ...] where it gathers; returns [E, N, C].
    """
    n, k = grad.shape[1], x.shape[1]
    out = x.new_empty(order.num_experts, n, k)
    per_expert = triton.cdiv(n, tile.m) * triton.cdiv(k, tile.n)
    _outer[(order.num_experts * per_expert,)](
        grad, x, out, order.slots, order.starts, n, k, grad.stride(0), x.stride(0),
        order.experts_per_token, gathers_grad, gathers_x, n % tile.m == 0, k % tile.n == 0,
        tile.m, tile.n, tile.k, tile.group, num_warps=tile.warps,
        num_stages=tile.stages + (gathers_grad or gathers_x),
    )  # fmt: skip
    return out


def check_tile(tile: GroupedTile, order: DeviceOrder) -> None:
    if tile.m != order.tile_rows:
        raise ValueError(f"a tile of {tile.m} rows, where the order has tiles of {order.tile_rows}")


def _kernel_name(proxy) -> str:
    """Name the kernel in profiles after its tile."""
    constants = proxy.constants
    m, n, k = constants["TILE_M"], constants["TILE_N"], constants["TILE_K"]
    what = "_gated" * bool(constants["GATED"]) + "_turned" * bool(constants["TURNED"])
    return f"_grouped_matmul{what}_{m}x{n}x{k}" + "_swap" * bool(constants["SWAP"])


@triton.jit(repr=_kernel_name, do_not_specialize=["max_tiles", "num_experts"])
def _grouped(
    x, table, out, slots, starts, tiles, scales, k, n, x_stride, max_tiles, num_experts,
    OUT_PARTS: tl.constexpr, SUM_PARTS: tl.constexpr, PER_TOKEN: tl.constexpr,
    GATHERS: tl.constexpr, SCALED: tl.constexpr, GATED: tl.constexpr, TURNED: tl.constexpr,
    ALIGNED: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    columns = tl.cdiv(n, TILE_N) * OUT_PARTS
    wait()
    num_tiles = max_tiles if ONE_TOKEN else tl.load(tiles)
    tile, column_tile = _place_of(tl.program_id(0), num_tiles, columns, GROUP)
    if column_tile >= columns:
        return
    expert, row, is_row, slot = _rows_in(tile, slots, starts, tiles, max_tiles, ONE_TOKEN, TILE_M)
    if expert >= num_experts:
        return
    part = column_tile // tl.cdiv(n, TILE_N)
    column = column_tile % tl.cdiv(n, TILE_N) * TILE_N + tl.arange(0, TILE_N)
    source = slot // PER_TOKEN if GATHERS else tl.where(is_row, row, 0)
    x_at = x + source.to(tl.int64)[:, None] * x_stride
    total = tl.zeros((TILE_N, TILE_M) if SWAP else (TILE_M, TILE_N), tl.float32)
    up_total = total
    for addend in tl.static_range(SUM_PARTS):
        first = _weight(table + (part + addend) * num_experts + expert, x, ALIGNED)
        second = _weight(table + num_experts + expert, x, ALIGNED) if GATED else first
        for start in range(0, k, TILE_K):
            step = start + tl.arange(0, TILE_K)
            a = _rows_of(x_at, addend * k, step, k, is_row, EVEN_K)
            b = _tile_of(first, step, column, k, n, TURNED, EVEN_N, EVEN_K)
            total = _add_product(total, a, b, TURNED, SWAP)
            if GATED:
                b = _tile_of(second, step, column, k, n, TURNED, EVEN_N, EVEN_K)
                up_total = _add_product(up_total, a, b, TURNED, SWAP)
    if GATED:
        total = _gated(total, up_total, out.dtype.element_ty)
    if SWAP:
        total = tl.trans(total)
    if SCALED:
        total = total * tl.load(scales + slot, mask=is_row, other=0.0)[:, None]
    out_at = out + row.to(tl.int64)[:, None] * (n * OUT_PARTS) + part * n
    _store(out_at, column, total, n, is_row, EVEN_N)


@triton.jit
def _rows_in(
    tile, slots, starts, tiles, max_tiles,
    ONE_TOKEN: tl.constexpr, TILE_M: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Return the expert of a tile, its rows, which of them it has, and the slots of these.

    A single token's tile t is slot t, and its expert may be none (`num_experts`).
    """
    if ONE_TOKEN:
        expert = tl.load(tiles + tile)
        row = tile + tl.arange(0, TILE_M)
        is_row = row == tile
        slot = tl.where(is_row, row, 0)
    else:
        expert = tl.load(tiles + 1 + tile)
        row = tl.load(tiles + 1 + max_tiles + tile) + tl.arange(0, TILE_M)
        is_row = row < tl.load(starts + expert + 1)
        slot = tl.load(slots + row, mask=is_row, other=0)
    return expert, row, is_row, slot


@triton.jit
def _rows_of(x_at, first, step, k, is_row, EVEN_K: tl.constexpr) -> tl.tensor:
    """Return a step of K of a tile's rows; rows of no slot are zeros."""
    mask = is_row[:, None] if EVEN_K else is_row[:, None] & (step < k)[None, :]
    return tl.load(x_at + first + step[None, :], mask=mask, other=0.0)


@triton.jit
def _store(out_at, column, total, n, is_row, EVEN_N: tl.constexpr) -> None:
    mask = is_row[:, None] if EVEN_N else is_row[:, None] & (column < n)[None, :]
    at = out_at + column[None, :]
    tl.store(at, total.to(at.dtype.element_ty), mask=mask)


@triton.jit
def _place_of(program, num_tiles, columns, GROUP: tl.constexpr) -> tl.tuple:
    """Return a program's tile of rows and of columns; a column beyond the last where it has none.

    Of a group of tiles of rows, all have one column before any has the next. So the rows of a group
    and a column of weights are read from the cache.
    """
    first = program // (GROUP * columns) * GROUP
    within = program % (GROUP * columns)
    height = tl.minimum(num_tiles - first, GROUP)
    column = tl.where(height > 0, within // tl.maximum(height, 1), columns)
    return first + within % tl.maximum(height, 1), column


@triton.jit
def _gated(gate, up, dtype: tl.constexpr) -> tl.tensor:
    """Return SiLU(gate) * up, both rounded before."""
    return silu_times(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32))


@triton.jit
def _weight(entry, like, ALIGNED: tl.constexpr) -> tl.tensor:
    """Return the pointer to a weight, whose address is in a table."""
    weight = tl.load(entry).to(like.dtype)
    return tl.multiple_of(weight, 16) if ALIGNED else weight


@triton.jit
def _tile_of(
    weight, step, column, k, n,
    TURNED: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return a tile of a weight: [N, K] as it lies in memory or, if turned, [K, N]."""
    if TURNED:
        at = weight + step[:, None] * n + column[None, :]
        mask = (step < k)[:, None] & (column < n)[None, :]
    else:
        at = weight + column[:, None] * k + step[None, :]
        mask = (column < n)[:, None] & (step < k)[None, :]
    if EVEN_N and EVEN_K:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=mask, other=0.0)
    return tile


@triton.jit
def _add_product(total, a, b, TURNED: tl.constexpr, SWAP: tl.constexpr) -> tl.tensor:
    if TURNED:
        total = tl.dot(a, b, total)
    elif SWAP:
        total = tl.dot(b, tl.trans(a), total)
    else:
        total = tl.dot(a, tl.trans(b), total)
    return total


@triton.jit
def _outer(
    grad, x, out, slots, starts, n, k, grad_stride, x_stride,
    PER_TOKEN: tl.constexpr, GATHERS_GRAD: tl.constexpr, GATHERS_X: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(n, TILE_M), tl.cdiv(k, TILE_N)
    expert = tl.program_id(0) // (tiles_m * tiles_n)
    within = tl.program_id(0) % (tiles_m * tiles_n)
    group = within // (GROUP * tiles_n)
    height = min(tiles_m - group * GROUP, GROUP)
    in_group = within % (GROUP * tiles_n)
    high = (group * GROUP + in_group % height) * TILE_M + tl.arange(0, TILE_M)
    wide = (in_group // height) * TILE_N + tl.arange(0, TILE_N)
    begin, end = tl.load(starts + expert), tl.load(starts + expert + 1)
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for first in range(begin, end, TILE_K):
        row = first + tl.arange(0, TILE_K)
        is_row = row < end
        token = tl.load(slots + row, mask=is_row, other=0) // PER_TOKEN
        of_grad = (token if GATHERS_GRAD else tl.where(is_row, row, 0)).to(tl.int64)
        of_x = (token if GATHERS_X else tl.where(is_row, row, 0)).to(tl.int64)
        a_mask = is_row[:, None] if EVEN_N else is_row[:, None] & (high < n)[None, :]
        b_mask = is_row[:, None] if EVEN_K else is_row[:, None] & (wide < k)[None, :]
        a = tl.load(grad + of_grad[:, None] * grad_stride + high[None, :], mask=a_mask, other=0.0)
        b = tl.load(x + of_x[:, None] * x_stride + wide[None, :], mask=b_mask, other=0.0)
        total = tl.dot(tl.trans(a), b, total)
    at = out + expert.to(tl.int64) * n * k + high.to(tl.int64)[:, None] * k + wide[None, :]
    mask = (high < n)[:, None] & (wide < k)[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=mask)


def rows_to_experts(x: Tensor, order: DeviceOrder) -> Tensor:
    """Return the row of each slot's token. Shape: x [T, C]; returns [S, C]."""
    return x.index_select(0, torch.div(order.slots, order.experts_per_token, rounding_mode="floor"))
