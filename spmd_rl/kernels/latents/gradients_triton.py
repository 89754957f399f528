"""Gradients of attention to latents: weights are computed again from the sums that were kept.

One kernel takes tiles of rows through their keys, for queries. Another takes blocks of keys through
the rows that see them, for keys; all heads add to the one key, whose latent part was the value too.
Source: Dao et al., FlashAttention (2022), appendix B.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.latents.attend_triton import (
    both_parts,
    constants,
    latent_tile,
    places_of,
    products_of,
)
from spmd_rl.kernels.latents.sizes import LatentSizes
from spmd_rl.kernels.row_tiles.tiles import PAGE, RowTiles
from spmd_rl.kernels.row_tiles.tiles_triton import LOG2_E, rows_of, tile_of

PROGRAMS = 256  # that fill a GPU: fewer blocks of keys share their rows among several


class AttendedRows(NamedTuple):
    """What a backward pass needs: queries [T', H, D], keys [T', D], outputs [T', H, C], log sums
    [T', H], and the gradients of outputs. All are contiguous.
    """

    q: Tensor
    keys: Tensor
    out: Tensor
    log_sum: Tensor
    grad: Tensor


def latent_gradients(
    kept: AttendedRows, rows: RowTiles, blocks: RowTiles, sizes: LatentSizes
) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries and of keys, those of their values included.

    Sequences have no earlier tokens. `rows` are the tiles of the forward pass; `blocks` are tiles
    of one head.
    """
    grad_q, inner = _gradient_of_queries(kept, rows, sizes)
    return grad_q, _gradient_of_keys(kept, inner, blocks, sizes)


def _gradient_of_queries(
    kept: AttendedRows, tiles: RowTiles, sizes: LatentSizes
) -> tuple[Tensor, Tensor]:
    """Also return the inner product of each row's output with its gradient [T', H] fp32."""
    q, keys, out, log_sum, grad = kept
    grad_q, inner = torch.empty_like(q), torch.empty_like(log_sum)
    tile = latent_tile(q.dtype)
    _of_queries[(tiles.number,)](
        grad, q, keys, out, log_sum, inner, grad_q, tiles.table, tiles.pages, tiles.number,
        q.shape[1], *constants(sizes), tile.rows, tile.keys, PAGE,
        num_warps=tile.warps, num_stages=1,
    )  # fmt: skip
    return grad_q, inner


def _gradient_of_keys(
    kept: AttendedRows, inner: Tensor, blocks: RowTiles, sizes: LatentSizes
) -> Tensor:
    q, keys, _, log_sum, grad = kept
    tile, shares = latent_tile(q.dtype), triton.cdiv(PROGRAMS, blocks.number)
    grad_keys = keys.new_zeros(shares, *keys.shape, dtype=torch.float32)
    _of_keys[(blocks.number, shares)](
        grad, q, keys, log_sum, inner, grad_keys, blocks.table, blocks.number, len(keys),
        q.shape[1], *constants(sizes), tile.rows // 2, blocks.height, **tile.options,
    )  # fmt: skip
    return grad_keys.sum(0).to(keys.dtype)


@triton.jit(do_not_specialize=["num_tiles"])
def _of_queries(
    grad, q, keys, out, log_sum, inner, grad_q, table, pages, num_tiles,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROTARY: tl.constexpr, LATENTS: tl.constexpr,
    TURNED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
) -> None:  # fmt: skip
    """Also store the inner product of each row's output with its gradient, for `_of_keys`."""
    at, is_used, position, end, page = rows_of(table, num_tiles, HEADS, ROWS)
    query, turned = both_parts(q, at, is_used, LATENT, ROTARY, LATENTS, TURNED)
    value = tl.arange(0, LATENTS)[None, :]
    is_value, value = is_used[:, None] & (value < LATENT), at[:, None] * LATENT + value
    pushed = tl.load(grad + value, mask=is_value, other=0.0)
    given = tl.load(out + value, mask=is_value, other=0.0)
    along = tl.sum(pushed.to(tl.float32) * given.to(tl.float32), 1)
    tl.store(inner + at, along, mask=is_used)
    sums = tl.load(log_sum + at, mask=is_used, other=0.0)
    scale: tl.constexpr = (LATENT + ROTARY) ** -0.5
    of_latent = tl.zeros([ROWS, LATENTS], tl.float32)
    of_rotary = tl.zeros([ROWS, TURNED], tl.float32)
    for start in range(0, end, KEYS):
        place = start + tl.arange(0, KEYS)
        row = tl.load(pages + page + start // PAGE).to(tl.int64) + place % PAGE
        latent, turning = both_parts(keys, row, place < end, LATENT, ROTARY, LATENTS, TURNED)
        score = products_of(query, turned, latent, turning) * (scale * LOG2_E)
        is_seen = place[None, :] <= position[:, None]
        weight = tl.where(is_seen, tl.exp2(score - sums[:, None]), 0.0)
        change = tl.dot(pushed, tl.trans(latent), input_precision="ieee")
        change = (weight * (change - along[:, None])).to(latent.dtype)
        of_latent = tl.dot(change, latent, of_latent, input_precision="ieee")
        of_rotary = tl.dot(change, turning, of_rotary, input_precision="ieee")
    to_latent, is_latent, to_rotary, is_rotary = places_of(
        grad_q, at, is_used, LATENT, ROTARY, LATENTS, TURNED
    )
    tl.store(to_latent, (of_latent * scale).to(grad_q.dtype.element_ty), mask=is_latent)
    tl.store(to_rotary, (of_rotary * scale).to(grad_q.dtype.element_ty), mask=is_rotary)


@triton.jit
def _pairs_of_rows(
    grad, q, row, is_read, is_query, LATENT: tl.constexpr, ROTARY: tl.constexpr,
    LATENTS: tl.constexpr, TURNED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Return the latent and rotary parts of queries in the rows that `is_query` [N, 1] says.

    The others have the gradients of rows, beside zeros.
    """
    latent, is_latent, rotary, is_rotary = places_of(
        q, row, is_read, LATENT, ROTARY, LATENTS, TURNED
    )
    pushed = grad + row[:, None] * LATENT + tl.arange(0, LATENTS)[None, :]
    both = tl.load(tl.where(is_query, latent, pushed), mask=is_latent, other=0.0)
    return both, tl.load(rotary, mask=is_rotary & is_query, other=0.0)


@triton.jit(do_not_specialize=["num_blocks", "num_keys"])
def _of_keys(
    grad, q, keys, log_sum, inner, grad_keys, table, num_blocks, num_keys,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROTARY: tl.constexpr, LATENTS: tl.constexpr,
    TURNED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
) -> None:  # fmt: skip
    """Every program of a block's shares takes each so many-th tile of rows.

    A row's gradient and its query lie beside each other in a tile, so that one product gives the
    weights' gradients and the scores, and one sum takes what both add to a latent.
    """
    first, length, _, _, begin = tile_of(table, num_blocks)
    place, share = begin + tl.arange(0, KEYS), tl.program_id(1)
    at, is_there = first + place, place < length
    latent, turning = both_parts(keys, at, is_there, LATENT, ROTARY, LATENTS, TURNED)
    row, pair = tl.arange(0, ROWS), tl.arange(0, 2 * ROWS)
    is_query, pair = (pair % 2 == 1)[:, None], pair // 2
    scale: tl.constexpr = (LATENT + ROTARY) ** -0.5
    of_latent = tl.zeros([KEYS, LATENTS], tl.float32)
    of_rotary = tl.zeros([KEYS, TURNED], tl.float32)
    count, before = length * HEADS, first * HEADS
    for start in range(begin * HEADS + share * ROWS, count, tl.num_programs(1) * ROWS):
        both, turned = _pairs_of_rows(
            grad, q, before + start + pair, start + pair < count, is_query,
            LATENT, ROTARY, LATENTS, TURNED,
        )  # fmt: skip
        is_used = start + row < count
        sums = tl.load(log_sum + before + start + row, mask=is_used, other=0.0)
        along = tl.load(inner + before + start + row, mask=is_used, other=0.0)
        product = products_of(latent, turning, both, turned)
        change, score = tl.split(tl.reshape(product, [KEYS, ROWS, 2]))
        is_seen = is_used[None, :] & (place[:, None] <= ((start + row) // HEADS)[None, :])
        weight = tl.where(is_seen, tl.exp2(score * (scale * LOG2_E) - sums[None, :]), 0.0)
        change = weight * (change - along[None, :]) * scale
        added = tl.reshape(tl.join(weight, change), [KEYS, 2 * ROWS]).to(both.dtype)
        of_latent = tl.dot(added, both, of_latent, input_precision="ieee")
        of_rotary = tl.dot(added, turned, of_rotary, input_precision="ieee")
    to_latent, is_latent, to_rotary, is_rotary = places_of(
        grad_keys, share.to(tl.int64) * num_keys + at, is_there, LATENT, ROTARY, LATENTS, TURNED
    )
    tl.store(to_latent, of_latent, mask=is_latent)
    tl.store(to_rotary, of_rotary, mask=is_rotary)
