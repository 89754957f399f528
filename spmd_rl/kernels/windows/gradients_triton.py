"""Gradients of attention in a window: weights are computed again from the sums that were kept.

One kernel takes tiles of rows through the keys that they see, for queries. Another takes blocks of
keys through the rows that see them, for keys and values.
Source: Dao et al., FlashAttention (2022), appendix B.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.row_tiles.tiles import PAGE, RowTiles
from spmd_rl.kernels.row_tiles.tiles_triton import LOG2_E, tile_of
from spmd_rl.kernels.windows.attend_triton import (
    KEYS,
    ROWS,
    Attended,
    first_block,
    is_seen,
    keys_at,
    load_rows,
    queries_of,
    sizes_of,
    store_rows,
)

OPTIONS = {"num_warps": 4, "num_stages": 1}


class WindowRows(NamedTuple):
    """What was attended: queries [T', H, D], keys and values [T', K, D]; all contiguous."""

    q: Tensor
    k: Tensor
    v: Tensor


class RowGradients(NamedTuple):
    """Gradients of `WindowRows`, and inner products of outputs and their gradients [T', H] fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    inner: Tensor


def window_gradients(
    rows: WindowRows,
    found: Attended,
    grad: Tensor,
    window: int,
    tiles: RowTiles,
    blocks: RowTiles,
) -> RowGradients:
    """Return gradients for sequences that lie end to end, which have no earlier tokens.

    `tiles` are those of the forward pass; `blocks` are tiles of single tokens, each of a block of
    keys.
    """
    made = RowGradients(*(torch.zeros_like(one) for one in (*rows, found.log_sum)))
    sizes = sizes_of(rows.q, rows.k)
    _of_queries[(tiles.number, sizes[0])](
        grad, *rows, *found, made.inner, made.q, tiles.table, tiles.pages, tiles.number, tiles.unit,
        window, *sizes, ROWS, KEYS, PAGE, **OPTIONS,
    )  # fmt: skip
    _of_keys[(blocks.number, sizes[0])](
        grad, *rows, found.log_sum, made.inner, made.k, made.v, blocks.table, blocks.number, window,
        *sizes, ROWS, KEYS, **OPTIONS,
    )  # fmt: skip
    return made


@triton.jit(do_not_specialize=["num_tiles", "unit", "window"])
def _of_queries(
    grad, q, keys, values, out, log_sum, inner, grad_q, table, pages, num_tiles, unit, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
) -> None:  # fmt: skip
    """Also store the inner product of each row's output with its gradient, for `_of_keys`."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    token, head, is_used, position, end, page = queries_of(table, num_tiles, GROUP, HEADS, ROWS)
    query = load_rows(q, token, is_used, head, HEADS, DIM, DIMS)
    pushed = load_rows(grad, token, is_used, head, HEADS, DIM, DIMS)
    given = load_rows(out, token, is_used, head, HEADS, DIM, DIMS)
    along = tl.sum(pushed.to(tl.float32) * given.to(tl.float32), 1)
    tl.store(inner + token * HEADS + head, along, mask=is_used)
    sums = tl.load(log_sum + token * HEADS + head, mask=is_used, other=0.0)
    total = tl.zeros([ROWS, DIMS], tl.float32)
    own = tl.zeros([KEYS], tl.int64) + tl.program_id(1)
    for start in range(first_block(position, window, KEYS), end, KEYS):
        place = start + tl.arange(0, KEYS)
        row = keys_at(pages, page, place, place < end, unit, PAGE)
        key = load_rows(keys, row, place < end, own, KV_HEADS, DIM, DIMS)
        value = load_rows(values, row, place < end, own, KV_HEADS, DIM, DIMS)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * (DIM**-0.5 * LOG2_E)
        seen = is_seen(place[None, :], position[:, None], window)
        weight = tl.where(seen, tl.exp2(score - sums[:, None]), 0.0)
        change = tl.dot(pushed, tl.trans(value), input_precision="ieee")
        change = (weight * (change - along[:, None])).to(key.dtype)
        total = tl.dot(change, key, total, input_precision="ieee")
    store_rows(grad_q, token, is_used, head, total * DIM**-0.5, HEADS, DIM, DIMS)


@triton.jit(do_not_specialize=["num_blocks", "window"])
def _of_keys(
    grad, q, keys, values, log_sum, inner, grad_keys, grad_values, table, num_blocks, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
) -> None:  # fmt: skip
    HEADS: tl.constexpr = KV_HEADS * GROUP
    first, length, _, _, begin = tile_of(table, num_blocks)
    place, number = begin + tl.arange(0, KEYS), tl.program_id(1)
    own = tl.zeros([KEYS], tl.int64) + number
    at, is_key = first + place, place < length
    key = load_rows(keys, at, is_key, own, KV_HEADS, DIM, DIMS)
    value = load_rows(values, at, is_key, own, KV_HEADS, DIM, DIMS)
    of_key, of_value = tl.zeros([KEYS, DIMS], tl.float32), tl.zeros([KEYS, DIMS], tl.float32)
    last = tl.minimum(begin + KEYS + window - 1, length)
    for start in range(begin * GROUP, last * GROUP, ROWS):
        pair = start + tl.arange(0, ROWS)
        position, is_used = pair // GROUP, pair < length * GROUP
        token, head = first + position, number * GROUP + pair % GROUP
        query = load_rows(q, token, is_used, head, HEADS, DIM, DIMS)
        pushed = load_rows(grad, token, is_used, head, HEADS, DIM, DIMS)
        sums = tl.load(log_sum + token * HEADS + head, mask=is_used, other=0.0)
        along = tl.load(inner + token * HEADS + head, mask=is_used, other=0.0)
        score = tl.dot(key, tl.trans(query), input_precision="ieee") * (DIM**-0.5 * LOG2_E)
        seen = is_used[None, :] & is_seen(place[:, None], position[None, :], window)
        weight = tl.where(seen, tl.exp2(score - sums[None, :]), 0.0)
        of_value = tl.dot(weight.to(pushed.dtype), pushed, of_value, input_precision="ieee")
        change = tl.dot(value, tl.trans(pushed), input_precision="ieee")
        change = (weight * (change - along[None, :])).to(query.dtype)
        of_key = tl.dot(change, query, of_key, input_precision="ieee")
    store_rows(grad_keys, at, is_key, own, of_key * DIM**-0.5, KV_HEADS, DIM, DIMS)
    store_rows(grad_values, at, is_key, own, of_value, KV_HEADS, DIM, DIMS)
