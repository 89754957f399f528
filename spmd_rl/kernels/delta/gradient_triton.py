"""Gradients of the gated delta rule on NVIDIA GPUs, in chunks, as products of matrices.

The forward pass has other bits, those of the recurrence; in real numbers both are one function.
Within a chunk that begins with state H, and g the sums of log decays since it began:

    U = T (beta v) + W H                  what its tokens add to the state, with the keys k
    out = exp(g) q H + P U                P of i, j is exp(g_i - g_j) q_i k_j, for j at most i
    H' = exp(g_S) H + (exp(g_S - g) k)^T U
    T = (1 + A)^-1,  W = -T (beta exp(g) k),  A of i, j is beta_i exp(g_i - g_j) k_i k_j, j below i

One kernel finds T, W and what needs no state. One goes through the chunks of a sequence for H and
U, and back for the gradients of H' and U. One finds the gradients of the inputs, chunk by chunk.
Source: Yang et al., Gated Delta Networks (2024), section 3.3, for the form in chunks.

Shape letters: T tokens, N chunks of S tokens, V value heads, of which X are taken at once; D and E
the sizes of key and value heads.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels.delta.rule import DeltaHeads
from spmd_rl.kernels.runtime.ragged import offsets_within
from spmd_rl.kernels.runtime.upload import upload

CHUNK = 64
TILE = 64  # columns of a tile
SCRATCH = 1 << 30  # bytes, about, of what is kept of the heads that are taken at once


class Chunks(NamedTuple):
    """Where chunks lie, those of a sequence one after the other.

    Shape: first token [N] and number of tokens [N] of each; of each sequence the first chunk [B]
    and how many it has [B]; all int32 on the device.
    """

    first: Tensor
    count: Tensor
    first_chunk: Tensor
    num_chunks: Tensor

    @classmethod
    def of(cls, lengths: NDArray[np.int64], device: torch.device) -> Chunks:
        num_chunks = -(-lengths // CHUNK)
        within = offsets_within(num_chunks) * CHUNK
        first = np.repeat(np.cumsum(lengths) - lengths, num_chunks) + within
        count = np.minimum(np.repeat(lengths, num_chunks) - within, CHUNK)
        arrays = first, count, np.cumsum(num_chunks) - num_chunks, num_chunks
        return cls(*(upload(one.astype(np.int32), device) for one in arrays))


class StepGradients(NamedTuple):
    """Gradients of what the recurrence reads of each token, of each value head, fp32.

    Shape: heads [T, V, D + D + E], of query, key and values; log_decay and beta [T, V].
    """

    heads: Tensor
    log_decay: Tensor
    beta: Tensor


def delta_gradients(
    mixed: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    grad: Tensor,
    lengths: NDArray[np.int64],
    heads: DeltaHeads,
    precision: str,
) -> StepGradients:
    """Return the gradients for sequences of `lengths` that begin without a state.

    `precision` is that of products: "tf32", or "tf32x3", which is about fp32.
    Shape: mixed [T, C] as of `conv_heads`, log_decay and beta [T, V], grad [T, V, E], all fp32 and
    dense.
    """
    num_tokens, key_dim, value_dim = len(grad), heads.key_dim, heads.value_dim
    chunks = Chunks.of(lengths, mixed.device)
    width = 2 * key_dim + value_dim
    out = StepGradients(
        mixed.new_empty(num_tokens, heads.values, width),
        torch.empty_like(log_decay),
        torch.empty_like(beta),
    )
    rows = len(chunks.first) * CHUNK
    states = len(chunks.first) * key_dim * value_dim
    a_head = 4 * (rows * (CHUNK + key_dim + 2 * value_dim) + 2 * states)
    at_once = min(heads.values, max(1, SCRATCH // a_head))
    for begin in range(0, heads.values, at_once):
        count = min(at_once, heads.values - begin)
        _of_heads(mixed, log_decay, beta, grad, chunks, out, heads, begin, count, precision)
    return out


def _of_heads(
    mixed: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    grad: Tensor,
    chunks: Chunks,
    out: StepGradients,
    heads: DeltaHeads,
    begin: int,
    count: int,
    precision: str,
) -> None:
    """Write the gradients of `count` value heads from head `begin` on."""
    num_chunks, num_sequences = len(chunks.first), len(chunks.num_chunks)

    def scratch(*shape: int) -> Tensor:
        return mixed.new_empty(num_chunks, count, *shape)

    key_dim, value_dim = heads.key_dim, heads.value_dim
    inverse, w = scratch(CHUNK, CHUNK), scratch(CHUNK, key_dim)
    u, of_u = scratch(CHUNK, value_dim), scratch(CHUNK, value_dim)
    state, of_state = scratch(key_dim, value_dim), scratch(key_dim, value_dim)
    blocks = (max(16, triton.next_power_of_2(one)) for one in (key_dim, value_dim))
    given = mixed, log_decay, beta, grad
    where = begin, count
    sizes = heads.keys, heads.values, key_dim, value_dim, CHUNK, TILE, *blocks, precision
    _within[(num_chunks * count,)](
        *given, chunks.first, chunks.count, inverse, w, u, of_u, *where, *sizes, num_warps=4
    )
    grid = num_sequences * count, triton.cdiv(value_dim, TILE)
    for rows, kept, is_reverse in ((u, state, False), (of_u, of_state, True)):
        _scan[grid](
            *given, *chunks, w, rows, kept, *where, is_reverse, *sizes, num_warps=4
        )  # fmt: skip
    _gradients[(num_chunks * count,)](
        *given, chunks.first, chunks.count, inverse, u, of_u, state, of_state, *out, *where,
        *sizes, num_warps=8, num_stages=1,
    )  # fmt: skip


@triton.jit
def _dot(x, y, total, PRECISION: tl.constexpr) -> tl.tensor:
    return tl.dot(x, y, total, input_precision=PRECISION)


@triton.jit
def _rows(
    base, first, count, stride, offset, column, SIZE: tl.constexpr, S: tl.constexpr
) -> tl.tensor:
    """Return columns of a chunk's rows of `base`: zeros past its tokens, and past column `SIZE`."""
    row = tl.arange(0, S)
    at = (first + row).to(tl.int64)[:, None] * stride + offset + column[None, :]
    return tl.load(base + at, mask=(row < count)[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def _square(
    base, number, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the addresses of a tile of matrix `number` of scratch, and which of them exist."""
    at = number.to(tl.int64) * ROWS * COLUMNS + row[:, None] * COLUMNS + column[None, :]
    return base + at, (row < ROWS)[:, None] & (column < COLUMNS)[None, :]


@triton.jit
def _decays(log_decay, first, count, head, VALUE_HEADS: tl.constexpr, S: tl.constexpr) -> tl.tensor:
    """Return the sums of log decays since the chunk began; past its tokens, the last."""
    row = tl.arange(0, S)
    at = log_decay + (first + row).to(tl.int64) * VALUE_HEADS + head
    return tl.cumsum(tl.load(at, mask=row < count, other=0.0), 0)


@triton.jit
def _last(sums, S: tl.constexpr) -> tl.tensor:
    return tl.sum(tl.where(tl.arange(0, S) == S - 1, sums, 0.0), 0)


@triton.jit
def _between(sums, S: tl.constexpr) -> tl.tensor:
    """Return how much is left at token i of what token j added, for j at most i; else 0."""
    row = tl.arange(0, S)
    apart = sums[:, None] - sums[None, :]
    return tl.exp(tl.where(row[:, None] >= row[None, :], apart, -float("inf")))


@triton.jit
def _within(
    mixed, log_decay, beta, grad, first, count, inverse, w, u, of_u, begin, num_heads,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, S: tl.constexpr, TILE: tl.constexpr, KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Find T and W of a chunk, the part of U without a state, and of its gradient."""
    number, head = tl.program_id(0), begin + tl.program_id(0) % num_heads
    chunk = number // num_heads
    first, count = tl.load(first + chunk), tl.load(count + chunk)
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    query = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    key, value = query + KEY_HEADS * KEY_DIM, 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    row = tl.arange(0, S)
    sums = _decays(log_decay, first, count, head, VALUE_HEADS, S)
    at = (first + row).to(tl.int64) * VALUE_HEADS + head
    rate = tl.load(beta + at, mask=row < count, other=0.0)
    keys, queries = tl.zeros((S, S), tl.float32), tl.zeros((S, S), tl.float32)
    for start in tl.static_range(0, KEY_BLOCK, TILE):
        column = start + tl.arange(0, TILE if TILE < KEY_BLOCK else KEY_BLOCK)
        k = _rows(mixed, first, count, channels, key, column, KEY_DIM, S)
        q = _rows(mixed, first, count, channels, query, column, KEY_DIM, S)
        keys, queries = (
            _dot(k, tl.trans(k), keys, PRECISION),
            _dot(k, tl.trans(q), queries, PRECISION),
        )
    left = _between(sums, S)
    solved = tl.where(row[:, None] > row[None, :], -keys * left * rate[:, None], 0.0)
    for step in range(1, S):
        one = tl.sum(tl.where(row[:, None] == step, solved, 0.0), 0)
        one += tl.sum(one[:, None] * solved, 0)
        solved = tl.where(row[:, None] == step, one[None, :], solved)
    solved = tl.where(row[:, None] == row[None, :], 1.0, solved)
    to, _ = _square(inverse, number, row, row, S, S)
    tl.store(to, solved)
    seen = queries * tl.trans(left)
    for start in tl.static_range(0, VALUE_BLOCK, TILE):
        column = start + tl.arange(0, TILE if TILE < VALUE_BLOCK else VALUE_BLOCK)
        v = _rows(mixed, first, count, channels, value, column, VALUE_DIM, S)
        to, inside = _square(u, number, row, column, S, VALUE_DIM)
        tl.store(to, _dot(solved, v * rate[:, None], None, PRECISION), mask=inside)
        of_out = _rows(
            grad, first, count, VALUE_HEADS * VALUE_DIM, head * VALUE_DIM, column, VALUE_DIM, S
        )
        to, inside = _square(of_u, number, row, column, S, VALUE_DIM)
        tl.store(to, _dot(seen, of_out, None, PRECISION), mask=inside)
    for start in tl.static_range(0, KEY_BLOCK, TILE):
        column = start + tl.arange(0, TILE if TILE < KEY_BLOCK else KEY_BLOCK)
        k = _rows(mixed, first, count, channels, key, column, KEY_DIM, S)
        to, inside = _square(w, number, row, column, S, KEY_DIM)
        tl.store(
            to,
            -_dot(solved, k * (rate * tl.exp(sums))[:, None], None, PRECISION),
            mask=inside,
        )


@triton.jit
def _scan(
    mixed, log_decay, beta, grad, first, count, first_chunk, num_chunks, w, rows, kept, begin,
    num_heads, IS_REVERSE: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, S: tl.constexpr, TILE: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Go through the chunks of a sequence: complete `rows`, and write the states into `kept`.

    Forward the states are H, and the rows U. Backward they are the gradients of H' and U.
    """
    head = begin + tl.program_id(0) % num_heads
    sequence = tl.program_id(0) // num_heads
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    query = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    key, row = query + KEY_HEADS * KEY_DIM, tl.arange(0, S)
    size: tl.constexpr = TILE if TILE < VALUE_BLOCK else VALUE_BLOCK
    of_key, value = tl.arange(0, KEY_BLOCK), tl.program_id(1) * TILE + tl.arange(0, size)
    state = tl.zeros((KEY_BLOCK, size), tl.float32)
    chunk, total = tl.load(first_chunk + sequence), tl.load(num_chunks + sequence)
    for step in range(total):
        place = chunk + (total - 1 - step if IS_REVERSE else step)
        number = place * num_heads + tl.program_id(0) % num_heads
        start, tokens = tl.load(first + place), tl.load(count + place)
        sums = _decays(log_decay, start, tokens, head, VALUE_HEADS, S)
        last = _last(sums, S)
        to, inside = _square(kept, number, of_key, value, KEY_DIM, VALUE_DIM)
        tl.store(to, state, mask=inside)
        k = _rows(mixed, start, tokens, channels, key, of_key, KEY_DIM, S)
        k = k * tl.exp(last - sums)[:, None]
        at, inside = _square(w, number, row, of_key, S, KEY_DIM)
        read = tl.load(at, mask=inside, other=0.0)
        at, inside = _square(rows, number, row, value, S, VALUE_DIM)
        found = tl.load(at, mask=inside, other=0.0)
        if IS_REVERSE:
            found = _dot(k, state, found, PRECISION)
            state = _dot(tl.trans(read), found, state * tl.exp(last), PRECISION)
            q = _rows(mixed, start, tokens, channels, query, of_key, KEY_DIM, S)
            of_out = _rows(
                grad, start, tokens, VALUE_HEADS * VALUE_DIM, head * VALUE_DIM, value, VALUE_DIM, S
            )
            state = _dot(tl.trans(q * tl.exp(sums)[:, None]), of_out, state, PRECISION)
        else:
            found = _dot(read, state, found, PRECISION)
            state = _dot(tl.trans(k), found, state * tl.exp(last), PRECISION)
        tl.store(at, found, mask=inside)


@triton.jit
def _gradients(
    mixed, log_decay, beta, grad, first, count, inverse, u, of_u, before, after, of_heads,
    of_decay, of_beta, begin, num_heads, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, S: tl.constexpr, TILE: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Find the gradients of a chunk's queries, keys, values and gates.

    `of_u` is overwritten with the gradient of beta (v - exp(g) k H).
    """
    number, head = tl.program_id(0), begin + tl.program_id(0) % num_heads
    chunk = number // num_heads
    first, count = tl.load(first + chunk), tl.load(count + chunk)
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    out_width: tl.constexpr = VALUE_HEADS * VALUE_DIM
    width: tl.constexpr = VALUE_HEADS * (2 * KEY_DIM + VALUE_DIM)
    query = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    key, value = query + KEY_HEADS * KEY_DIM, 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    to_query = head * (2 * KEY_DIM + VALUE_DIM)
    row = tl.arange(0, S)
    is_row = row < count
    sums = _decays(log_decay, first, count, head, VALUE_HEADS, S)
    last, left = _last(sums, S), _between(sums, S)
    gate = (first + row).to(tl.int64) * VALUE_HEADS + head
    rate = tl.load(beta + gate, mask=is_row, other=0.0)
    to_rows = of_heads + (first + row).to(tl.int64)[:, None] * width + to_query
    whole, _ = _square(inverse, number, row, row, S, S)
    solved = tl.trans(tl.load(whole))
    seen, mixing = tl.zeros((S, S), tl.float32), tl.zeros((S, S), tl.float32)
    of_rate, of_sums = tl.zeros((S,), tl.float32), tl.zeros((S,), tl.float32)
    for start in range(0, VALUE_BLOCK, TILE):
        other = start + tl.arange(0, TILE if TILE < VALUE_BLOCK else VALUE_BLOCK)
        rows, is_there = _square(of_u, number, row, other, S, VALUE_DIM)
        of_added = _dot(solved, tl.load(rows, mask=is_there, other=0.0), None, PRECISION)
        tl.store(rows, of_added, mask=is_there)
        v = _rows(mixed, first, count, channels, value, other, VALUE_DIM, S)
        of_rate += tl.sum(of_added * v, 1)
        is_there = is_row[:, None] & (other < VALUE_DIM)[None, :]
        tl.store(to_rows + 2 * KEY_DIM + other[None, :], of_added * rate[:, None], mask=is_there)
        of_out = _rows(grad, first, count, out_width, head * VALUE_DIM, other, VALUE_DIM, S)
        rows, is_there = _square(u, number, row, other, S, VALUE_DIM)
        added = tl.trans(tl.load(rows, mask=is_there, other=0.0))
        seen = _dot(of_out, added, seen, PRECISION)
        mixing = _dot(of_added, added, mixing, PRECISION)
    tl.debug_barrier()  # other threads read what was stored in `of_u`
    seen = seen * left
    mixing = tl.where(row[:, None] > row[None, :], -mixing * left, 0.0)
    since, until = tl.exp(sums)[:, None], tl.exp(last - sums)[:, None]
    of_last = tl.sum(of_sums, 0)  # 0
    for start in range(0, KEY_BLOCK, TILE):
        column = start + tl.arange(0, TILE if TILE < KEY_BLOCK else KEY_BLOCK)
        q = _rows(mixed, first, count, channels, query, column, KEY_DIM, S)
        k = _rows(mixed, first, count, channels, key, column, KEY_DIM, S)
        of_query, of_read, of_handed = tl.zeros_like(q), tl.zeros_like(q), tl.zeros_like(q)
        for begin_value in range(0, VALUE_BLOCK, TILE):
            other = begin_value + tl.arange(0, TILE if TILE < VALUE_BLOCK else VALUE_BLOCK)
            at, inside = _square(before, number, column, other, KEY_DIM, VALUE_DIM)
            state = tl.load(at, mask=inside, other=0.0)
            of_out = _rows(grad, first, count, out_width, head * VALUE_DIM, other, VALUE_DIM, S)
            of_query = _dot(of_out, tl.trans(state), of_query, PRECISION)
            rows, is_there = _square(of_u, number, row, other, S, VALUE_DIM)
            of_added = tl.load(rows, mask=is_there, other=0.0)
            of_read = _dot(of_added, tl.trans(state), of_read, PRECISION)
            at, inside = _square(after, number, column, other, KEY_DIM, VALUE_DIM)
            of_state = tl.load(at, mask=inside, other=0.0)
            of_last += tl.sum(tl.sum(state * of_state, 1), 0)
            rows, is_there = _square(u, number, row, other, S, VALUE_DIM)
            added = tl.load(rows, mask=is_there, other=0.0)
            of_handed = _dot(added, tl.trans(of_state), of_handed, PRECISION)
        of_query = _dot(seen, k, of_query * since, PRECISION)
        of_read, of_handed = of_read * since, of_handed * until
        own = _dot(mixing, k, None, PRECISION)
        of_rate += tl.sum(k * (own - of_read), 1)
        spread = _dot(tl.trans(seen), q, None, PRECISION)
        spread = _dot(tl.trans(mixing), k * rate[:, None], spread, PRECISION)
        own, of_read = own * rate[:, None], of_read * rate[:, None]
        of_key = spread + of_handed + own - of_read
        inside = is_row[:, None] & (column < KEY_DIM)[None, :]
        tl.store(to_rows + column[None, :], of_query, mask=inside)
        tl.store(to_rows + KEY_DIM + column[None, :], of_key, mask=inside)
        of_sums += tl.sum(q * of_query - k * (spread + of_handed - own + of_read), 1)
        of_sums += tl.where(row == S - 1, tl.sum(tl.sum(k * of_handed, 1), 0), 0.0)
    of_sums += tl.where(row == S - 1, of_last * tl.exp(last), 0.0)
    tl.store(of_decay + gate, tl.cumsum(of_sums, 0, reverse=True), mask=is_row)
    tl.store(of_beta + gate, of_rate, mask=is_row)
