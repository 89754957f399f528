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

from spmd_rl.kernels.latents.attend_triton import LOG2_E, tile_of
from spmd_rl.kernels.latents.tiles import PAGE, LatentTiles
from spmd_rl.kernels.windows.attend_triton import (
    KEYS,
    ROWS,
    Attended,
    is_seen,
    keys_at,
    queries_of,
    rows_at,
)

OPTIONS = {"num_warps": 4, "num_stages": 1}


class Rows(NamedTuple):
    """What was attended: queries [T', H, D], keys and values [T', K, D]; all contiguous."""

    q: Tensor
    k: Tensor
    v: Tensor


class RowGradients(NamedTuple):
    """Gradients of `Rows`, and the inner products of outputs and their gradients [T', H] fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    inner: Tensor


def window_gradients(
    rows: Rows,
    found: Attended,
    grad: Tensor,
    window: int,
    tiles: LatentTiles,
    blocks: LatentTiles,
) -> RowGradients:
    """Return gradients for sequences that lie end to end, which have no earlier tokens.

    `tiles` are those of the forward pass; `blocks` are tiles of single tokens, each of a block of
    keys.
    """
    (_, kv_heads, dim), heads = rows.k.shape, rows.q.shape[1]
    made = RowGradients(*(torch.zeros_like(one) for one in (*rows, found.log_sum)))
    sizes = kv_heads, heads // kv_heads, dim, max(16, triton.next_power_of_2(dim))
    _of_queries[(tiles.number, kv_heads)](
        grad, *rows, *found, made.inner, made.q, tiles.table, tiles.pages, tiles.number, tiles.unit,
        window, *sizes, ROWS, KEYS, PAGE, **OPTIONS,
    )  # fmt: skip
    _of_keys[(blocks.number, kv_heads)](
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
    at, is_there = rows_at(q, token, is_used, head, HEADS, DIM, DIMS)
    query = tl.load(at, mask=is_there, other=0.0)
    at, _ = rows_at(grad, token, is_used, head, HEADS, DIM, DIMS)
    pushed = tl.load(at, mask=is_there, other=0.0)
    at, _ = rows_at(out, token, is_used, head, HEADS, DIM, DIMS)
    given = tl.load(at, mask=is_there, other=0.0)
    along = tl.sum(pushed.to(tl.float32) * given.to(tl.float32), 1)
    tl.store(inner + token * HEADS + head, along, mask=is_used)
    sums = tl.load(log_sum + token * HEADS + head, mask=is_used, other=0.0)
    total = tl.zeros([ROWS, DIMS], tl.float32)
    own = tl.zeros([KEYS], tl.int64) + tl.program_id(1)
    first = tl.maximum(tl.min(position, 0) - window + 1, 0) // KEYS * KEYS
    for start in range(first, end, KEYS):
        place = start + tl.arange(0, KEYS)
        row = keys_at(pages, page, place, place < end, unit, PAGE)
        of_keys, is_key = rows_at(keys, row, place < end, own, KV_HEADS, DIM, DIMS)
        of_values, _ = rows_at(values, row, place < end, own, KV_HEADS, DIM, DIMS)
        key, value = (
            tl.load(of_keys, mask=is_key, other=0.0),
            tl.load(of_values, mask=is_key, other=0.0),
        )
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * (DIM**-0.5 * LOG2_E)
        seen = is_seen(place[None, :], position[:, None], window)
        weight = tl.where(seen, tl.exp2(score - sums[:, None]), 0.0)
        change = tl.dot(pushed, tl.trans(value), input_precision="ieee")
        change = (weight * (change - along[:, None])).to(key.dtype)
        total = tl.dot(change, key, total, input_precision="ieee")
    at, _ = rows_at(grad_q, token, is_used, head, HEADS, DIM, DIMS)
    tl.store(at, (total * DIM**-0.5).to(grad_q.dtype.element_ty), mask=is_there)


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
    of_keys, is_key = rows_at(keys, first + place, place < length, own, KV_HEADS, DIM, DIMS)
    of_values, _ = rows_at(values, first + place, place < length, own, KV_HEADS, DIM, DIMS)
    key, value = (
        tl.load(of_keys, mask=is_key, other=0.0),
        tl.load(of_values, mask=is_key, other=0.0),
    )
    of_key, of_value = tl.zeros([KEYS, DIMS], tl.float32), tl.zeros([KEYS, DIMS], tl.float32)
    last = tl.minimum(begin + KEYS + window - 1, length)
    for start in range(begin * GROUP, last * GROUP, ROWS):
        pair = start + tl.arange(0, ROWS)
        position, is_used = pair // GROUP, pair < length * GROUP
        token, head = first + position, number * GROUP + pair % GROUP
        at, is_there = rows_at(q, token, is_used, head, HEADS, DIM, DIMS)
        query = tl.load(at, mask=is_there, other=0.0)
        at, _ = rows_at(grad, token, is_used, head, HEADS, DIM, DIMS)
        pushed = tl.load(at, mask=is_there, other=0.0)
        sums = tl.load(log_sum + token * HEADS + head, mask=is_used, other=0.0)
        along = tl.load(inner + token * HEADS + head, mask=is_used, other=0.0)
        score = tl.dot(key, tl.trans(query), input_precision="ieee") * (DIM**-0.5 * LOG2_E)
        seen = is_used[None, :] & is_seen(place[:, None], position[None, :], window)
        weight = tl.where(seen, tl.exp2(score - sums[None, :]), 0.0)
        of_value = tl.dot(weight.to(pushed.dtype), pushed, of_value, input_precision="ieee")
        change = tl.dot(value, tl.trans(pushed), input_precision="ieee")
        change = (weight * (change - along[None, :])).to(query.dtype)
        of_key = tl.dot(change, query, of_key, input_precision="ieee")
    at, _ = rows_at(grad_keys, first + place, place < length, own, KV_HEADS, DIM, DIMS)
    tl.store(at, (of_key * DIM**-0.5).to(grad_keys.dtype.element_ty), mask=is_key)
    at, _ = rows_at(grad_values, first + place, place < length, own, KV_HEADS, DIM, DIMS)
    tl.store(at, of_value.to(grad_values.dtype.element_ty), mask=is_key)
