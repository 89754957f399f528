"""Data and paged sequences of tests/unit/kernels on a GPU, in bfloat16 by default."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.unit.kernels import paged_case
from tests.unit.kernels.paged_case import Data, Heads

DEVICE = torch.device("cuda")


def qkv(total: int, heads: Heads, *, dtype: torch.dtype = torch.bfloat16) -> Data:
    return paged_case.qkv(total, heads, dtype=dtype, device=DEVICE)


def each(data: Data, function: Callable[[Tensor], Tensor]) -> Data:
    """Return what `function` makes of the queries, of the keys and of the values."""
    q, k, v = data
    return function(q), function(k), function(v)


def sequences(data: Data, lengths: list[int]) -> list[Data]:
    """Return the rows of each sequence."""
    q, k, v = (x.split(lengths) for x in data)
    return list(zip(q, k, v, strict=True))


def padded(data: Data) -> Data:
    """Return `data` with rows of 7 at its end, up to a multiple of 16 rows."""
    return each(data, lambda x: torch.cat([x, x.new_full((-len(x) % 16, *x.shape[1:]), 7.0)]))


class Paged(paged_case.Paged):
    def __init__(
        self,
        lengths: list[int],
        heads: Heads,
        page_size: int,
        poison: bool = False,
        split: int = 0,
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(lengths, heads, page_size, poison, split, dtype=dtype, device=DEVICE)
