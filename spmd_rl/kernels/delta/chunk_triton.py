"""What the kernels of the gated delta rule's gradients share: tiles of a chunk, and its decays."""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(x, y, total, PRECISION: tl.constexpr) -> tl.tensor:
    return tl.dot(x, y, total, input_precision=PRECISION)


@triton.jit
def head_of(
    number, begin, num_heads, SERVED: tl.constexpr, KEY_WIDTH: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    """Return the head of a program, and the first channels of its query, key and values."""
    head = begin + number % num_heads
    query = head // SERVED * KEY_DIM
    return head, query, query + KEY_WIDTH, 2 * KEY_WIDTH + head * VALUE_DIM


@triton.jit
def rates_of(
    beta, first, tokens, chunk, head, VALUE_HEADS: tl.constexpr, S: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Return a chunk's first token, its number of tokens, where its gates lie, and its betas."""
    start, count, row = tl.load(first + chunk), tl.load(tokens + chunk), tl.arange(0, S)
    at = (start + row).to(tl.int64) * VALUE_HEADS + head
    return start, count, at, tl.load(beta + at, mask=row < count, other=0.0)


@triton.jit
def token_rows(
    base, first, count, stride, offset, column, SIZE: tl.constexpr, S: tl.constexpr
) -> tl.tensor:
    """Return columns of a chunk's rows of `base`: zeros past its tokens, and past column `SIZE`."""
    row = tl.arange(0, S)
    at = (first + row).to(tl.int64)[:, None] * stride + offset + column[None, :]
    return tl.load(base + at, mask=(row < count)[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def tile_of(
    base, number, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the addresses of a tile of matrix `number` of scratch, and which of them exist."""
    at = number.to(tl.int64) * ROWS * COLUMNS + row[:, None] * COLUMNS + column[None, :]
    return base + at, (row < ROWS)[:, None] & (column < COLUMNS)[None, :]


@triton.jit
def load_tile(base, number, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    at, inside = tile_of(base, number, row, column, ROWS, COLUMNS)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store_tile(base, number, row, column, tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> None:
    at, inside = tile_of(base, number, row, column, ROWS, COLUMNS)
    tl.store(at, tile, mask=inside)


@triton.jit
def decays(
    log_decay, first, count, head, VALUE_HEADS: tl.constexpr, S: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the sums of log decays since the chunk began; past its tokens, the last. And it."""
    row = tl.arange(0, S)
    at = log_decay + (first + row).to(tl.int64) * VALUE_HEADS + head
    sums = tl.cumsum(tl.load(at, mask=row < count, other=0.0), 0)
    return sums, tl.sum(tl.where(row == S - 1, sums, 0.0), 0)


@triton.jit
def left_between(sums, S: tl.constexpr) -> tl.tensor:
    """Return how much is left at token i of what token j added, for j at most i; else 0."""
    row = tl.arange(0, S)
    apart = sums[:, None] - sums[None, :]
    return tl.exp(tl.where(row[:, None] >= row[None, :], apart, -float("inf")))


@triton.jit
def inverse_of(lower, S: tl.constexpr) -> tl.tensor:
    """Return (1 + lower)^-1 of a matrix with nothing on and above its diagonal, row by row."""
    row = tl.arange(0, S)
    solved = -lower
    for step in range(1, S):
        line = tl.sum(tl.where(row[:, None] == step, solved, 0.0), 0)
        line += tl.sum(line[:, None] * solved, 0)
        solved = tl.where(row[:, None] == step, line[None, :], solved)
    return tl.where(row[:, None] == row[None, :], 1.0, solved)
