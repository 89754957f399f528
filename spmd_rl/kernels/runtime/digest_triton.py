"""Digests of many boxes on NVIDIA GPUs: each element is read once, in a single launch.

A box is given as runs: rows of equal length and distance in memory, and in the index of the whole
tensor. The sums are those of weights/digest.py, whose additions may come in any order.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.runtime.chunks import chunks_of
from spmd_rl.kernels.runtime.upload import upload

GAMMA, ODD = tl.constexpr(0x9E3779B97F4A7C15), tl.constexpr(0xD1342543DE82EF95)
MIX_1, MIX_2 = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)

BLOCK = 1024  # elements at once
BLOCKS = 32  # that one program adds up
ALIGN_BYTES = 16  # of memory that is read in wide loads
BITS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
# how a float32 is read: as its own bits, or as those of the bfloat16 that a push makes of it
CASTS = {(torch.float32, torch.bfloat16)}


class Rows(NamedTuple):
    """Part of a box: `num_rows` rows of `row_size` elements, `stride` elements apart in memory.

    Several rows have less than 2**31 elements together. Element c of row r has the index
    `first + r * index_stride + c` in the whole tensor. Its digest is added to number `box`.
    """

    address: int
    num_rows: int
    row_size: int
    stride: int
    first: int
    index_stride: int
    box: int


def can_cast(dtype: torch.dtype, target: torch.dtype) -> bool:
    return dtype == target or (dtype, target) in CASTS


class RowDigests:
    """Digests of rows, whose elements are of `dtype`, cast to `target`. Prepared for many launches.

    The memory of the rows has to stay where it is.
    """

    def __init__(
        self, rows: Sequence[Rows], dtype: torch.dtype, target: torch.dtype, device: torch.device
    ) -> None:
        table = np.array(rows, dtype=np.int64)
        programs = chunks_of(table[:, 1] * table[:, 2], BLOCK * BLOCKS)
        self._num_programs = len(programs)
        self._table, self._programs = upload(table, device), upload(programs, device)
        self._constants = {
            "CASTS": dtype != target,
            "BITS": BITS[target.itemsize],
            "ALIGNED": not (table[:, 0] % ALIGN_BYTES).any(),
        }

    def add_to(self, sums: Tensor) -> None:
        """Add the digest of each row to that of its box. Shape: sums [number of boxes] int64."""
        _add_digests[(self._num_programs,)](
            sums,
            self._table,
            self._programs,
            **self._constants,
            BLOCK=BLOCK,
            BLOCKS=BLOCKS,
            num_warps=4,
        )


@triton.jit
def _add_digests(
    sums,
    table,
    programs,
    CASTS: tl.constexpr,
    BITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    row = table + tl.load(programs + 2 * program) * 7
    chunk = tl.load(programs + 2 * program + 1)
    address = tl.load(row)
    num_rows = tl.load(row + 1)
    row_size = tl.load(row + 2)
    stride = tl.load(row + 3)
    first = tl.load(row + 4)
    index_stride = tl.load(row + 5)
    if CASTS:
        memory = address.to(tl.pointer_type(tl.float32))
    else:
        memory = address.to(tl.pointer_type(BITS))
    if ALIGNED:
        memory = tl.multiple_of(memory, 16)
    size = num_rows * row_size
    begin = chunk * (BLOCK * BLOCKS)
    lane = tl.arange(0, BLOCK)
    lane_keys = lane.to(tl.uint64) * GAMMA
    total = tl.zeros((BLOCK,), tl.int64)
    for step in range(BLOCKS):
        start = begin + step * BLOCK
        key = (first + start).to(tl.uint64, bitcast=True) * GAMMA
        at = start + lane
        inside = at < size
        if num_rows > 1:
            place = at.to(tl.int32)
            r = place // row_size.to(tl.int32)
            c = place - r * row_size.to(tl.int32)
            index = first + r * index_stride + c
            values = tl.load(memory + (r * stride + c), mask=inside, other=0)
            mixed = _mix(values, index.to(tl.uint64, bitcast=True) * GAMMA, CASTS)
            total += tl.where(inside, mixed, 0)
        elif start + BLOCK <= size:  # without a mask, loads are wide
            total += _mix(tl.load(memory + at), key + lane_keys, CASTS)
        elif start < size:
            values = tl.load(memory + at, mask=inside, other=0)
            total += tl.where(inside, _mix(values, key + lane_keys, CASTS), 0)
    tl.atomic_add(sums + tl.load(row + 6), tl.sum(total, axis=0), sem="relaxed")


@triton.jit
def _mix(values, keys, CASTS: tl.constexpr) -> tl.tensor:
    """Return the term of each element in the sum, as int64."""
    if CASTS:
        bits = values.to(tl.bfloat16).to(tl.int16, bitcast=True)
    else:
        bits = values
    x = keys + bits.to(tl.int64).to(tl.uint64, bitcast=True) * ODD
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    x = x ^ (x >> 31)
    return x.to(tl.int64, bitcast=True)
