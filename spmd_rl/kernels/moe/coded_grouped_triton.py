"""Grouped GEMMs on NVIDIA Hopper whose weights are in few bits: each row times its expert's weight.

Codes are decoded in registers, as `low_precision/coded_gemm_triton.py` does it. Each element has
the chain over K of `grouped_triton.py`, so its bits are those of a product with decoded weights.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.low_precision.unpack_triton import products_of, scale_offset
from spmd_rl.kernels.moe.expert_addresses import Addresses
from spmd_rl.kernels.moe.grouped_tiles import GroupedTile
from spmd_rl.kernels.moe.grouped_triton import _gated, _place_of, _rows_in, _rows_of, _store
from spmd_rl.kernels.moe.order_triton import DeviceOrder
from spmd_rl.kernels.runtime.pdl import overlapping, wait


class CodedTiles(NamedTuple):
    """Tiles for gate and up with their activation, and for any other product.

    Their `n` and `k` divide a block, so that a step has one scale of a row. With codes of 4 bits
    `k` is a block. The weight is the first operand.
    """

    gated: GroupedTile
    plain: GroupedTile


# Bits of a code, and rows of a tile, which the order of slots has chosen: its tiles.
TILES: dict[int, dict[int, CodedTiles]] = {
    8: {
        16: CodedTiles(
            GroupedTile(16, 64, 128, 4, 4, swap=True), GroupedTile(16, 64, 128, 4, 5, swap=True)
        ),
        64: CodedTiles(
            GroupedTile(64, 64, 64, 4, 4, swap=True), GroupedTile(64, 64, 128, 4, 4, swap=True)
        ),
        128: CodedTiles(
            GroupedTile(128, 128, 64, 8, 4, swap=True), GroupedTile(128, 128, 64, 8, 4, swap=True)
        ),
    },
    4: {
        16: CodedTiles(
            GroupedTile(16, 64, 128, 4, 4, swap=True), GroupedTile(16, 64, 128, 4, 5, swap=True)
        ),
        64: CodedTiles(
            GroupedTile(64, 64, 128, 4, 3, swap=True), GroupedTile(64, 64, 128, 4, 4, swap=True)
        ),
        128: CodedTiles(
            GroupedTile(128, 128, 128, 8, 3, swap=True), GroupedTile(128, 128, 128, 8, 3, swap=True)
        ),
    },
}


def coded_grouped_matmul(
    x: Tensor,
    weights: Addresses,
    order: DeviceOrder,
    tile: GroupedTile | None = None,
    *,
    gathers: bool = False,
    gated: bool = False,
    scales: Tensor | None = None,
) -> Tensor:
    """Return what `grouped_matmul` does with decoded weights, rounded once to x's dtype.

    Shape: x [T, C] or [S, C], weights of P parts [N, C], scales [T K] fp32 by slot; returns
    [S, P N], or if gated [S, N].
    """
    code_format = weights.format
    assert code_format is not None and weights.scales is not None, "the weights are not codes"
    tiles = TILES[code_format.bits][order.tile_rows]
    tile = tile or (tiles.gated if gated else tiles.plain)
    assert code_format.has_kernels, f"experts in {code_format.name} have no kernels"
    block = code_format.block_columns
    assert code_format.per_byte == 1 or tile.k == block, (
        "a byte has codes of both halves of a block"
    )
    parts, (n, k) = weights.num_parts, weights.shape
    out = x.new_empty(order.num_slots, n if gated else parts * n)
    out_parts = 1 if gated else parts
    _coded_grouped[(order.max_tiles * triton.cdiv(n, tile.n) * out_parts,)](
        x, weights.table, weights.scales, out, order.slots, order.starts, order.tiles,
        out if scales is None else scales, k, n, code_format.code_shape((n, k))[1], x.stride(0),
        order.max_tiles, weights.num_experts, out_parts, order.experts_per_token, gathers,
        scales is not None, gated, weights.is_aligned, n % tile.n == 0, k % tile.k == 0,
        order.is_one_token, tile.m, tile.n, tile.k, tile.group,
        block, code_format.block_rows, code_format.bits,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False, **overlapping(),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["max_tiles", "num_experts"])
def _coded_grouped(
    x, table, scale_table, out, slots, starts, tiles, scales, k, n, code_columns, x_stride,
    max_tiles, num_experts, OUT_PARTS: tl.constexpr, PER_TOKEN: tl.constexpr,
    GATHERS: tl.constexpr, SCALED: tl.constexpr, GATED: tl.constexpr,
    ALIGNED: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, ONE_TOKEN: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BITS: tl.constexpr,
) -> None:  # fmt: skip
    of_part = tl.cdiv(n, TILE_N)
    columns = of_part * OUT_PARTS
    wait()
    num_tiles = max_tiles if ONE_TOKEN else tl.load(tiles)
    tile, column_tile = _place_of(tl.program_id(0), num_tiles, columns, GROUP)
    if column_tile >= columns:
        return
    expert, row, is_row, slot = _rows_in(tile, slots, starts, tiles, max_tiles, ONE_TOKEN, TILE_M)
    if expert >= num_experts:
        return
    part = column_tile // of_part
    first_column = column_tile % of_part * TILE_N
    column = first_column + tl.arange(0, TILE_N)
    source = slot // PER_TOKEN if GATHERS else tl.where(is_row, row, 0)
    x_at = x + source.to(tl.int64)[:, None] * x_stride
    blocks = tl.cdiv(k, BLOCK)
    scale_row = scale_offset(first_column, column, n, blocks, BLOCK_N)
    entry = part * num_experts + expert
    first, first_scales = _codes_of(table, scale_table, entry, scale_row, ALIGNED, BITS)
    second, second_scales = first, first_scales
    if GATED:
        entry += num_experts
        second, second_scales = _codes_of(table, scale_table, entry, scale_row, ALIGNED, BITS)
    total = tl.zeros((TILE_N, TILE_M), tl.float32)
    up_total = total
    scale, up_scale = tl.load(first_scales), tl.load(second_scales)
    for start in range(0, k, TILE_K):
        # the scales of the next step are on their way while this one multiplies
        next_scale = _after(first_scales, start, blocks, TILE_K, BLOCK)
        next_up_scale = _after(second_scales, start, blocks, TILE_K, BLOCK) if GATED else next_scale
        total, up_total = _add_products(
            total, up_total, first, second, scale, up_scale, x_at, column, start, n, k,
            code_columns, is_row, GATED, EVEN_N, EVEN_K, TILE_K, BITS,
        )  # fmt: skip
        scale, up_scale = next_scale, next_up_scale
    if GATED:
        total = _gated(total, up_total, out.dtype.element_ty)
    total = tl.trans(total)
    if SCALED:
        total = total * tl.load(scales + slot, mask=is_row, other=0.0)[:, None]
    out_at = out + row.to(tl.int64)[:, None] * (n * OUT_PARTS) + part * n
    _store(out_at, column, total, n, is_row, EVEN_N)


@triton.jit
def _after(scales, start, blocks, TILE_K: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Return the scale of the step after that at `start`; of the last one any."""
    return tl.load(scales + min((start + TILE_K) // BLOCK, blocks - 1))


@triton.jit
def _codes_of(
    table, scale_table, entry, scale_row, ALIGNED: tl.constexpr, BITS: tl.constexpr
) -> tl.tuple:
    """Return the pointers to an expert's codes, and to the scales of a row of blocks."""
    codes = tl.load(table + entry).to(tl.pointer_type(tl.uint8))
    if BITS == 4:
        scales = tl.load(scale_table + entry).to(tl.pointer_type(tl.bfloat16))
    else:
        scales = tl.load(scale_table + entry).to(tl.pointer_type(tl.float32))
    return tl.multiple_of(codes, 16) if ALIGNED else codes, scales + scale_row


@triton.jit
def _add_products(
    total, up_total, first, second, scale, up_scale, x_at, column, start, n, k,
    code_columns, is_row, GATED: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    TILE_K: tl.constexpr, BITS: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Add the products of a step of K, in ascending order of its parts."""
    PART_K: tl.constexpr = TILE_K * BITS // 8
    byte = start * BITS // 8 + tl.arange(0, PART_K)
    packed = _tile_of(first, column, byte, n, code_columns, EVEN_N and EVEN_K)
    up_packed = packed
    if GATED:
        up_packed = _tile_of(second, column, byte, n, code_columns, EVEN_N and EVEN_K)
    for part in tl.static_range(8 // BITS):
        step = start + part * PART_K + tl.arange(0, PART_K)
        rows = tl.trans(_rows_of(x_at, 0, step, k, is_row, EVEN_K))
        total = tl.dot(products_of(packed, scale, part, BITS), rows, total)
        if GATED:
            up_total = tl.dot(products_of(up_packed, up_scale, part, BITS), rows, up_total)
    return total, up_total


@triton.jit
def _tile_of(codes, column, byte, n, code_columns, EVEN: tl.constexpr) -> tl.tensor:
    """Return a tile of codes [N, K]; beyond the weight they stand for zero."""
    at = codes + column[:, None] * code_columns + byte[None, :]
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=(column < n)[:, None] & (byte < code_columns)[None, :], other=0)
