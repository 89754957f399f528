"""Sums and columns of ranks that share a layer, by the memory of the GPUs of a host.

Each rank has two buffers that all ranks read. A call puts this rank's part into one of them. Behind
a barrier, each rank reads the parts of all. Then the next call takes the other buffer. So one
barrier a call is enough: a rank that puts into a buffer again has passed the barrier of the call
between. All others have come to that barrier, behind their own reads of the buffer.

A number on the device says which buffer is next, so that recorded calls may be replayed in any
order. `put` reads it and leaves a copy, and what reads the parts sets it anew from that copy. So no
program of a kernel reads what another one of the same kernel writes.

A large sum takes two steps, each as a call does. First each rank sums its share of the elements,
into the other buffer. Behind another barrier, all read the shares of all. That is less to read, by
a factor of nearly half the ranks, and the next call takes the first buffer again. Elements are
added in the same order, and rounded as often.

Shape letters: T rows, N columns of a rank; P ranks.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
WIDE = tl.constexpr(8192)  # elements of a program


class PeerBuffers(NamedTuple):
    """Two buffers of each rank, of `num_words` words of 4 bytes.

    `own` are this rank's, and `peers` the addresses of all ranks'. `turns` has the number of the
    next buffer, and a copy for what reads it.
    Shape: own [2, num_words] int32, peers [P] int64, turns [2] int32.
    """

    own: Tensor
    peers: Tensor
    turns: Tensor

    @property
    def num_words(self) -> int:
        return self.own.shape[1]


def put(own: Tensor, buffers: PeerBuffers) -> None:
    """Write this rank's part into its next buffer. Shape: own [T, N] int32, contiguous."""
    size = own.numel()
    _put[(triton.cdiv(size, BLOCK),)](
        own, buffers.own, buffers.turns, size, buffers.num_words, BLOCK
    )


def sum_of_peers(out: Tensor, bias: Tensor | None, buffers: PeerBuffers) -> None:
    """Set `out` to the sum over ranks plus the bias, rounded once. Shape: out [T, N], bias [N]."""
    size = out.numel()
    _sum_of_peers[(triton.cdiv(size, BLOCK),)](
        out, bias, buffers.peers, buffers.turns, size, out.shape[1], buffers.num_words,
        len(buffers.peers), BLOCK, enable_fp_fusion=False,
    )  # fmt: skip


def sum_own_share(
    shape: Sequence[int], rank: int, bias: Tensor | None, dtype: torch.dtype, buffers: PeerBuffers
) -> None:
    """Write the sum of this rank's share of [T, N] into its other buffer, rounded to `dtype`."""
    size, share = _shares(shape, buffers)
    _sum_own_share[(share // BLOCK,)](
        buffers.own.view(dtype), bias, buffers.peers, buffers.turns, rank * share, size, shape[1],
        buffers.num_words, len(buffers.peers), BLOCK, enable_fp_fusion=False,
    )  # fmt: skip


def shares_of_peers(out: Tensor, buffers: PeerBuffers) -> None:
    """Set `out` to the shares of all ranks. Shape: out [T, N], contiguous."""
    size, share = _shares(out.shape, buffers)
    _shares_of_peers[(triton.cdiv(size, BLOCK),)](
        out, buffers.peers, buffers.turns, size, share // BLOCK, buffers.num_words, BLOCK
    )


def _shares(shape: Sequence[int], buffers: PeerBuffers) -> tuple[int, int]:
    """Return the number of elements, and of those in a share: whole blocks, but for the end."""
    size = prod(shape)
    return size, triton.cdiv(triton.cdiv(size, len(buffers.peers)), BLOCK) * BLOCK


def columns_of_peers(out: Tensor, buffers: PeerBuffers) -> None:
    """Set `out` to the columns of all ranks. Shape: out [T, P N] int32, contiguous."""
    num_rows, num_ranks = len(out), len(buffers.peers)
    columns = out.shape[1] // num_ranks
    _columns_of_peers[(num_rows, num_ranks, triton.cdiv(columns, BLOCK))](
        out, buffers.peers, buffers.turns, columns, buffers.num_words, num_ranks, BLOCK
    )


@triton.jit
def _put(own, mine, turns, size, num_words, BLOCK: tl.constexpr) -> None:
    number = tl.load(turns)
    if tl.program_id(0) == 0:
        tl.store(turns + 1, number)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(own + at, mask=at < size)
    tl.store(mine + number * num_words + at, value, mask=at < size)


@triton.jit
def _sum_of_peers(
    out, bias, peers, turns, size, columns, num_words, RANKS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    number = tl.load(turns + 1)
    if tl.program_id(0) == 0:
        tl.store(turns, 1 - number)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = _total_and_bias(bias, peers, number * num_words, at, inside, columns, RANKS)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum_own_share(
    mine, bias, peers, turns, first, size, columns, num_words,
    RANKS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    number = tl.load(turns + 1)
    to = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = first + to
    inside = at < size
    total = _total_and_bias(bias, peers, number * num_words, at, inside, columns, RANKS)
    kind: tl.constexpr = mine.dtype.element_ty
    tl.store(mine + _other(number, num_words, kind) + to, total.to(kind), mask=inside)


@triton.jit
def _shares_of_peers(
    out, peers, turns, size, blocks_of_share, num_words, BLOCK: tl.constexpr
) -> None:
    number, block = tl.load(turns + 1), tl.program_id(0)
    kind: tl.constexpr = out.dtype.element_ty
    rank = block // blocks_of_share
    given = tl.multiple_of(tl.load(peers + rank).to(tl.pointer_type(kind)), 16)
    each = tl.arange(0, BLOCK)
    at = block * BLOCK + each
    share = _other(number, num_words, kind) + (block - rank * blocks_of_share) * BLOCK + each
    tl.store(out + at, tl.load(given + share, mask=at < size), mask=at < size)


@triton.jit
def _other(number, num_words, kind: tl.constexpr) -> tl.tensor:
    """The first element of the buffer that is not `number`."""
    return (1 - number) * (num_words * (32 // kind.primitive_bitwidth))


@triton.jit
def _total_and_bias(bias, peers, first, at, inside, columns, RANKS: tl.constexpr) -> tl.tensor:
    total = total_of_peers(peers, first, at, inside, RANKS)
    if bias is not None:
        total += tl.load(bias + at % columns, mask=inside).to(tl.float32)
    return total


@triton.jit
def total_of_peers(peers, first, at, inside, RANKS: tl.constexpr) -> tl.tensor:
    """Return the sum over ranks of elements of their buffers, 0 outside."""
    total = _two(peers, 0, first, at, inside)
    if RANKS >= 4:
        total += _two(peers, 2, first, at, inside)
    if RANKS == 8:
        if at.numel >= WIDE:  # registers do not hold what all ranks give at once
            tl.debug_barrier()
        total += _two(peers, 4, first, at, inside) + _two(peers, 6, first, at, inside)
    return total


@triton.jit
def _two(peers, rank, first, at, inside) -> tl.tensor:
    """The sum of the parts of two neighbours."""
    left = tl.multiple_of(tl.load(peers + rank).to(tl.pointer_type(tl.float32)), 16)
    right = tl.multiple_of(tl.load(peers + rank + 1).to(tl.pointer_type(tl.float32)), 16)
    own = tl.load(left + first + at, mask=inside, other=0.0)
    return own + tl.load(right + first + at, mask=inside, other=0.0)


@triton.jit
def _columns_of_peers(
    out, peers, turns, columns, num_words, RANKS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    number = tl.load(turns + 1)
    row, peer, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if (row == 0) & (peer == 0) & (part == 0):
        tl.store(turns, 1 - number)
    column = part * BLOCK + tl.arange(0, BLOCK)
    given = tl.multiple_of(tl.load(peers + peer).to(tl.pointer_type(tl.int32)), 16)
    at = number * num_words + row * columns + column
    value = tl.load(given + at, mask=column < columns)
    tl.store(out + (row * RANKS + peer) * columns + column, value, mask=column < columns)
