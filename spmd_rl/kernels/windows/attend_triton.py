"""Attention in a window on NVIDIA GPUs: each query sees the last keys up to its own.

A program takes a tile of one sequence's rows, which are pairs of a token and a query head of one
key-value head, through the blocks of keys that one of the rows sees. Blocks begin at multiples of
their size from the start of the sequence, and a block that a row does not see leaves it unchanged.
So a row has the same bits in packed sequences and in pages, whatever is in its tile.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.row_tiles.tiles import PAGE, RowTiles
from spmd_rl.kernels.row_tiles.tiles_triton import LOG2_E, rows_of
from spmd_rl.kernels.runtime.padding import dense

ROWS = KEYS = PAGE  # of a program, and of a block
OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}


class Attended(NamedTuple):
    """What attention gives [T', H, D], and the logs to base 2 of its denominators [T', H] fp32."""

    out: Tensor
    log_sum: Tensor


def attend_in_window(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks: Tensor | None,
    window: int,
    tiles: RowTiles,
    page_size: int,
) -> Attended:
    """Attend in float32 to keys of which `tiles` say where they lie.

    Weights are rounded to the dtype of keys, and the result once. A sink is in the denominator.
    Shape: q [T', H, D]; keys and values [S, K, D], contiguous; sinks [H]. Tokens of no tile have
    unset results.
    """
    q, sizes = dense(q), sizes_of(q, keys)
    found = Attended(torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32))
    _attend[(tiles.number, sizes[0])](
        q, keys, values, q if sinks is None else dense(sinks), *found, tiles.table, tiles.pages,
        tiles.number, tiles.unit, window, *sizes, sinks is not None, ROWS, KEYS, page_size,
        **OPTIONS,
    )  # fmt: skip
    return found


def sizes_of(q: Tensor, keys: Tensor) -> tuple[int, int, int, int]:
    """Return the key-value heads, the query heads of each, the size of one, and the power of two
    that holds it.
    """
    (_, kv_heads, dim), heads = keys.shape, q.shape[1]
    return kv_heads, heads // kv_heads, dim, max(16, triton.next_power_of_2(dim))


@triton.jit
def rows_at(
    x, row, is_there, head, HEADS: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return where the elements of `head` [N] lie in rows [N] of x [.., HEADS, DIM], and which
    are there.
    """
    column = tl.arange(0, DIMS)[None, :]
    at = x + ((row * HEADS + head) * DIM)[:, None] + column
    return at, is_there[:, None] & (column < DIM)


@triton.jit
def load_rows(
    x, row, is_there, head, HEADS: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr
) -> tl.tensor:
    """Return the elements of `rows_at`; zeros where none are."""
    at, is_there = rows_at(x, row, is_there, head, HEADS, DIM, DIMS)
    return tl.load(at, mask=is_there, other=0.0)


@triton.jit
def store_rows(
    x, row, is_there, head, value, HEADS: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr
) -> None:
    at, is_there = rows_at(x, row, is_there, head, HEADS, DIM, DIMS)
    tl.store(at, value.to(x.dtype.element_ty), mask=is_there)


@triton.jit
def first_block(position, window, KEYS: tl.constexpr) -> tl.tensor:
    """Return the place of the first key of a block before which no row sees any."""
    return tl.maximum(tl.min(position, 0) - window + 1, 0) // KEYS * KEYS


@triton.jit
def queries_of(
    table, num_tiles, GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Return a tile's tokens and query heads, which rows are used, their positions, the tokens
    that they see, and where their sequence's pages begin.
    """
    pair, is_used, position, end, page = rows_of(table, num_tiles, GROUP, ROWS)
    head = tl.program_id(1) * GROUP + pair % GROUP
    return pair // GROUP, head, is_used, position, end, page


@triton.jit
def keys_at(pages, page, place, is_there, unit, PAGE: tl.constexpr) -> tl.tensor:
    """Return the rows of keys and values at places of a sequence."""
    first = tl.load(pages + page + place // PAGE, mask=is_there, other=0).to(tl.int64)
    return first * unit + place % PAGE


@triton.jit
def is_seen(place, position, window) -> tl.tensor:
    """Return whether a query at a position sees the key at a place."""
    return (place <= position) & (place > position - window)


@triton.jit(do_not_specialize=["num_tiles", "unit", "window"])
def _attend(
    q, keys, values, sinks, out, log_sum, table, pages, num_tiles, unit, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr,
    HAS_SINKS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
) -> None:  # fmt: skip
    HEADS: tl.constexpr = KV_HEADS * GROUP
    token, head, is_used, position, end, page = queries_of(table, num_tiles, GROUP, HEADS, ROWS)
    query = load_rows(q, token, is_used, head, HEADS, DIM, DIMS)
    best = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, DIMS], tl.float32)
    own = tl.zeros([KEYS], tl.int64) + tl.program_id(1)
    for start in range(first_block(position, window, KEYS), end, KEYS):
        place = start + tl.arange(0, KEYS)
        row = keys_at(pages, page, place, place < end, unit, PAGE)
        key = load_rows(keys, row, place < end, own, KV_HEADS, DIM, DIMS)
        value = load_rows(values, row, place < end, own, KV_HEADS, DIM, DIMS)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * (DIM**-0.5 * LOG2_E)
        score = tl.where(is_seen(place[None, :], position[:, None], window), score, -float("inf"))
        better = tl.maximum(best, tl.max(score, 1))
        # of a row that has seen no key yet, no number is made of infinities
        least = tl.where(better == -float("inf"), 0.0, better)
        weight, kept = tl.exp2(score - least[:, None]), tl.exp2(best - least)
        total = total * kept + tl.sum(weight, 1)
        weighted = tl.dot(
            weight.to(value.dtype), value, weighted * kept[:, None], input_precision="ieee"
        )
        best = better
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_used, other=0.0).to(tl.float32) * LOG2_E
        total += tl.exp2(sink - best)
    result = weighted / total[:, None]
    result = tl.where(result == 0, 0.0, result)  # a block that a row does not see makes +0 of -0
    store_rows(out, token, is_used, head, result, HEADS, DIM, DIMS)
    tl.store(log_sum + token * HEADS + head, best + tl.log2(total), mask=is_used)
