"""Kernels of the gated delta rule's gradients; `gradients.py` says what they compute.

Program `number` has a chunk and one of its heads. Tensors of scratch have a matrix for each.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from spmd_rl.kernels.delta.chunk_triton import (
    decays,
    dot,
    head_of,
    inverse_of,
    left_between,
    load_tile,
    rates_of,
    store_tile,
    token_rows,
)


@triton.jit
def within(
    mixed, log_decay, grad, first, tokens, beta, inverse, u, of_u, w, begin, num_heads,
    CHANNELS: tl.constexpr, SERVED: tl.constexpr, KEY_WIDTH: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, S: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Find T and W of a chunk, the part of U without a state, and of its gradient."""
    number = tl.program_id(0)
    head, query, key, value = head_of(
        number, begin, num_heads, SERVED, KEY_WIDTH, KEY_DIM, VALUE_DIM
    )
    chunk, row = number // num_heads, tl.arange(0, S)
    start, count, _, rate = rates_of(beta, first, tokens, chunk, head, VALUE_HEADS, S)
    sums, _ = decays(log_decay, start, count, head, VALUE_HEADS, S)
    keys, queries = tl.zeros((S, S), tl.float32), tl.zeros((S, S), tl.float32)
    for tile in tl.static_range(0, KEY_BLOCK, KEY_TILE):
        column = tile + tl.arange(0, KEY_TILE)
        k = token_rows(mixed, start, count, CHANNELS, key, column, KEY_DIM, S)
        q = token_rows(mixed, start, count, CHANNELS, query, column, KEY_DIM, S)
        keys = dot(k, tl.trans(k), keys, PRECISION)
        queries = dot(k, tl.trans(q), queries, PRECISION)
    left = left_between(sums, S)
    lower = tl.where(row[:, None] > row[None, :], keys * left * rate[:, None], 0.0)
    solved = inverse_of(lower, S)
    store_tile(inverse, number, row, row, solved, S, S)
    seen = queries * tl.trans(left)
    width: tl.constexpr = VALUE_HEADS * VALUE_DIM
    for tile in tl.static_range(0, VALUE_BLOCK, VALUE_TILE):
        column = tile + tl.arange(0, VALUE_TILE)
        v = token_rows(mixed, start, count, CHANNELS, value, column, VALUE_DIM, S)
        v = dot(solved, v * rate[:, None], None, PRECISION)
        store_tile(u, number, row, column, v, S, VALUE_DIM)
        of_out = token_rows(grad, start, count, width, head * VALUE_DIM, column, VALUE_DIM, S)
        of_out = dot(seen, of_out, None, PRECISION)
        store_tile(of_u, number, row, column, of_out, S, VALUE_DIM)
    for tile in tl.static_range(0, KEY_BLOCK, KEY_TILE):
        column = tile + tl.arange(0, KEY_TILE)
        k = token_rows(mixed, start, count, CHANNELS, key, column, KEY_DIM, S)
        k = -dot(solved, k * (rate * tl.exp(sums))[:, None], None, PRECISION)
        store_tile(w, number, row, column, k, S, KEY_DIM)


@triton.jit
def scan(
    mixed, log_decay, grad, first, tokens, first_chunk, num_chunks, w, rows, kept, begin,
    num_heads, IS_REVERSE: tl.constexpr, CHANNELS: tl.constexpr, SERVED: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, S: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Go through the chunks of a sequence: complete `rows`, and write the states into `kept`.

    Forward the states are H, and the rows U. Backward they are the gradients of H' and U.
    """
    head, query, key, _ = head_of(
        tl.program_id(0), begin, num_heads, SERVED, KEY_WIDTH, KEY_DIM, VALUE_DIM
    )
    sequence = tl.program_id(0) // num_heads
    chunk, total = tl.load(first_chunk + sequence), tl.load(num_chunks + sequence)
    row, of_key = tl.arange(0, S), tl.arange(0, KEY_BLOCK)
    value = tl.program_id(1) * VALUE_TILE + tl.arange(0, VALUE_TILE)
    width: tl.constexpr = VALUE_HEADS * VALUE_DIM
    state = tl.zeros((KEY_BLOCK, VALUE_TILE), tl.float32)
    for step in range(total):
        place = chunk + (total - 1 - step if IS_REVERSE else step)
        number = place * num_heads + head - begin
        start, count = tl.load(first + place), tl.load(tokens + place)
        sums, last = decays(log_decay, start, count, head, VALUE_HEADS, S)
        store_tile(kept, number, of_key, value, state, KEY_DIM, VALUE_DIM)
        k = token_rows(mixed, start, count, CHANNELS, key, of_key, KEY_DIM, S)
        k = k * tl.exp(last - sums)[:, None]
        read = load_tile(w, number, row, of_key, S, KEY_DIM)
        line = load_tile(rows, number, row, value, S, VALUE_DIM)
        if IS_REVERSE:
            line = dot(k, state, line, PRECISION)
            state = dot(tl.trans(read), line, state * tl.exp(last), PRECISION)
            q = token_rows(mixed, start, count, CHANNELS, query, of_key, KEY_DIM, S)
            of_out = token_rows(grad, start, count, width, head * VALUE_DIM, value, VALUE_DIM, S)
            state = dot(tl.trans(q * tl.exp(sums)[:, None]), of_out, state, PRECISION)
        else:
            line = dot(read, state, line, PRECISION)
            state = dot(tl.trans(k), line, state * tl.exp(last), PRECISION)
        store_tile(rows, number, row, value, line, S, VALUE_DIM)


@triton.jit
def gradients(
    mixed, log_decay, grad, first, tokens, beta, inverse, u, of_u, before, after, of_heads,
    of_decay, of_beta, begin, num_heads, CHANNELS: tl.constexpr, SERVED: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, S: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Find the gradients of a chunk's queries, keys, values and gates."""
    number = tl.program_id(0)
    head, query, key, value = head_of(
        number, begin, num_heads, SERVED, KEY_WIDTH, KEY_DIM, VALUE_DIM
    )
    chunk, row = number // num_heads, tl.arange(0, S)
    start, count, at, rate = rates_of(beta, first, tokens, chunk, head, VALUE_HEADS, S)
    to = of_heads + at[:, None] * (2 * KEY_DIM + VALUE_DIM)
    seen, mixing, of_rate = _of_values(
        mixed, grad, start, count, rate, inverse, u, of_u, to + 2 * KEY_DIM, number, value, head,
        CHANNELS, VALUE_HEADS, VALUE_DIM, S, VALUE_BLOCK, VALUE_TILE, PRECISION,
    )  # fmt: skip
    tl.debug_barrier()  # other threads read what was stored in `of_u`
    sums, last = decays(log_decay, start, count, head, VALUE_HEADS, S)
    left = left_between(sums, S)
    seen = seen * left
    mixing = tl.where(row[:, None] > row[None, :], -mixing * left, 0.0)
    of_sums, of_rates = _of_keys(
        mixed, grad, start, count, u, of_u, before, after, seen, mixing, rate, sums, last, to,
        number, head, query, key, CHANNELS, VALUE_HEADS, KEY_DIM, VALUE_DIM, S, KEY_BLOCK,
        VALUE_BLOCK, KEY_TILE, VALUE_TILE, PRECISION,
    )  # fmt: skip
    tl.store(of_decay + at, tl.cumsum(of_sums, 0, reverse=True), mask=row < count)
    tl.store(of_beta + at, of_rate + of_rates, mask=row < count)


@triton.jit
def _of_keys(
    mixed, grad, start, count, u, of_u, before, after, seen, mixing, rate, sums, last, to, number,
    head, query, key, CHANNELS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, S: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr, PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Write the gradients of queries and keys; return those of the sums of decays, and of beta."""
    row = tl.arange(0, S)
    since, until = tl.exp(sums)[:, None], tl.exp(last - sums)[:, None]
    of_rate = tl.zeros((S,), tl.float32)
    of_sums = tl.zeros((S,), tl.float32)
    for tile in range(0, KEY_BLOCK, KEY_TILE):
        column = tile + tl.arange(0, KEY_TILE)
        q = token_rows(mixed, start, count, CHANNELS, query, column, KEY_DIM, S)
        k = token_rows(mixed, start, count, CHANNELS, key, column, KEY_DIM, S)
        of_query, of_read, of_handed, of_last = _of_states(
            grad, start, count, u, of_u, before, after, number, head, column, VALUE_HEADS, KEY_DIM,
            VALUE_DIM, S, VALUE_BLOCK, KEY_TILE, VALUE_TILE, PRECISION,
        )  # fmt: skip
        of_query = dot(seen, k, of_query * since, PRECISION)
        of_read, of_handed = of_read * since, of_handed * until
        own, spread = _of_mixing(seen, mixing, q, k, rate, PRECISION)
        of_rate += tl.sum(k * (own - of_read), 1)
        own = (own - of_read) * rate[:, None]
        inside = (row < count)[:, None] & (column < KEY_DIM)[None, :]
        tl.store(to + column[None, :], of_query, mask=inside)
        tl.store(to + KEY_DIM + column[None, :], spread + of_handed + own, mask=inside)
        of_sums += tl.sum(q * of_query - k * (spread + of_handed - own), 1)
        of_last = of_last * tl.exp(last) + tl.sum(tl.sum(k * of_handed, 1), 0)
        of_sums += tl.where(row == S - 1, of_last, 0.0)
    return of_sums, of_rate


@triton.jit
def _of_mixing(seen, mixing, q, k, rate, PRECISION: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Return what reaches the keys of P and A: of rows of A without beta, and of all columns."""
    spread = dot(tl.trans(seen), q, None, PRECISION)
    spread = dot(tl.trans(mixing), k * rate[:, None], spread, PRECISION)
    return dot(mixing, k, None, PRECISION), spread


@triton.jit
def _of_values(
    mixed, grad, start, count, rate, inverse, u, of_u, to, number, value, head,
    CHANNELS: tl.constexpr, VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, S: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, VALUE_TILE: tl.constexpr, PRECISION: tl.constexpr,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    """Find the gradients of values, and in sums over them those of P, of A and of beta.

    `of_u` is overwritten with the gradient of beta (v - exp(g) k H).
    """
    row = tl.arange(0, S)
    solved = tl.trans(load_tile(inverse, number, row, row, S, S))
    seen, mixing = tl.zeros((S, S), tl.float32), tl.zeros((S, S), tl.float32)
    of_rate = tl.zeros((S,), tl.float32)
    width: tl.constexpr = VALUE_HEADS * VALUE_DIM
    for tile in range(0, VALUE_BLOCK, VALUE_TILE):
        column = tile + tl.arange(0, VALUE_TILE)
        of_added = load_tile(of_u, number, row, column, S, VALUE_DIM)
        of_added = dot(solved, of_added, None, PRECISION)
        store_tile(of_u, number, row, column, of_added, S, VALUE_DIM)
        v = token_rows(mixed, start, count, CHANNELS, value, column, VALUE_DIM, S)
        of_rate += tl.sum(of_added * v, 1)
        inside = (row < count)[:, None] & (column < VALUE_DIM)[None, :]
        tl.store(to + column[None, :], of_added * rate[:, None], mask=inside)
        of_out = token_rows(grad, start, count, width, head * VALUE_DIM, column, VALUE_DIM, S)
        added = tl.trans(load_tile(u, number, row, column, S, VALUE_DIM))
        seen = dot(of_out, added, seen, PRECISION)
        mixing = dot(of_added, added, mixing, PRECISION)
    return seen, mixing, of_rate


@triton.jit
def _of_states(
    grad, start, count, u, of_u, before, after, number, head, column, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, S: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr, PRECISION: tl.constexpr,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    """Return what reaches queries, keys that read, keys that hand on, and the last decay."""
    row = tl.arange(0, S)
    of_query, of_read = tl.zeros((S, KEY_TILE), tl.float32), tl.zeros((S, KEY_TILE), tl.float32)
    of_handed, of_last = tl.zeros((S, KEY_TILE), tl.float32), tl.zeros((KEY_TILE,), tl.float32)
    width: tl.constexpr = VALUE_HEADS * VALUE_DIM
    for tile in range(0, VALUE_BLOCK, VALUE_TILE):
        other = tile + tl.arange(0, VALUE_TILE)
        state = load_tile(before, number, column, other, KEY_DIM, VALUE_DIM)
        of_out = token_rows(grad, start, count, width, head * VALUE_DIM, other, VALUE_DIM, S)
        of_query = dot(of_out, tl.trans(state), of_query, PRECISION)
        of_added = load_tile(of_u, number, row, other, S, VALUE_DIM)
        of_read = dot(of_added, tl.trans(state), of_read, PRECISION)
        of_state = load_tile(after, number, column, other, KEY_DIM, VALUE_DIM)
        of_last += tl.sum(state * of_state, 1)
        added = load_tile(u, number, row, other, S, VALUE_DIM)
        of_handed = dot(added, tl.trans(of_state), of_handed, PRECISION)
    return of_query, of_read, of_handed, tl.sum(of_last, 0)
