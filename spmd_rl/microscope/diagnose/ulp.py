"""Distances in units in the last place: the steps between two numbers of one format."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_rl.kernels.rowwise.row_hash import wide_bits

_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def rank(x: Tensor) -> Tensor:
    """Return the rank of each number among all of its format, as int64.

    -0 is just below +0, and NaNs are beyond the infinities.
    """
    bits = x.contiguous().view(_INTEGERS[x.dtype]).to(torch.int64)
    largest = torch.iinfo(_INTEGERS[x.dtype]).max
    return torch.where(bits >= 0, bits, -1 - (bits & largest))


def distances(x: Tensor, y: Tensor) -> Tensor:
    """Return the steps between elements of `x` and `y`, in the coarser format, as int64."""
    dtype = torch.bfloat16 if torch.bfloat16 in (x.dtype, y.dtype) else torch.float32
    return (rank(x.to(dtype)) - rank(y.to(dtype))).abs()


def rows_differ(x: Tensor, y: Tensor) -> Tensor:
    """Return which rows differ in any bit of the wider format. Shape: [R, C] twice -> [R] bool."""
    return (wide_bits(x) != wide_bits(y)).any(1) if len(x) else torch.zeros(0, dtype=torch.bool)


@dataclass(frozen=True)
class Histogram:
    """Counts by distance, of which `counts[0]` is that of equal elements.

    Elements of bucket b > 0 are 2**(b-1) to 2**b - 1 steps apart.
    """

    counts: tuple[int, ...]
    largest: int

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def unequal(self) -> int:
        return sum(self.counts[1:])

    @staticmethod
    def label(bucket: int) -> str:
        if bucket <= 1:
            return str(bucket)
        return f"{2 ** (bucket - 1)}–{2**bucket - 1}"


def histogram(x: Tensor, y: Tensor) -> Histogram:
    """Return the distances of all elements of two tensors of one shape."""
    steps = distances(x, y).flatten()
    if not len(steps):
        return Histogram((0,), 0)
    largest = int(steps.max())
    # The first distance of each bucket: 1, 2, 4, ...
    edges = 2 ** torch.arange(largest.bit_length(), dtype=torch.int64)
    counts = torch.bincount(torch.bucketize(steps, edges, right=True), minlength=len(edges) + 1)
    return Histogram(tuple(counts.tolist()), largest)
