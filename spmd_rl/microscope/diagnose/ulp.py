"""Distances in units in the last place: how many numbers of the format lie between two."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def ordered(x: Tensor) -> Tensor:
    """The place of each number among all of its format, int64: -0 just below +0, NaNs beyond the
    infinities.
    """
    bits = x.contiguous().view(_INTEGERS[x.dtype]).to(torch.int64)
    largest = torch.iinfo(_INTEGERS[x.dtype]).max
    return torch.where(bits >= 0, bits, -1 - (bits & largest))


def distances(x: Tensor, y: Tensor) -> Tensor:
    """Steps between the elements of `x` and `y`, in the coarser of their formats; int64."""
    dtype = torch.bfloat16 if torch.bfloat16 in (x.dtype, y.dtype) else torch.float32
    return (ordered(x.to(dtype)) - ordered(y.to(dtype))).abs()


@dataclass(frozen=True)
class Histogram:
    """`counts[0]` elements are equal; `counts[b]` lie 2**(b-1) to 2**b - 1 steps apart."""

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
    """Of all elements of two tensors of one shape."""
    steps = distances(x, y).flatten()
    if not len(steps):
        return Histogram((0,), 0)
    largest = int(steps.max())
    # 1, 2, 4, ...: the first of each bucket
    edges = 2 ** torch.arange(largest.bit_length(), dtype=torch.int64)
    counts = torch.bincount(torch.bucketize(steps, edges, right=True), minlength=len(edges) + 1)
    return Histogram(tuple(counts.tolist()), largest)
