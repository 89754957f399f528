"""Gathers and sums of ranks that have unequally many rows. Gloo has those of equally many alone.

They take the places of functions of Megatron-core on CPUs, where ranks share experts along etp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.kernels.runtime.collectives import rows_of_ranks

OfRows = Callable[..., Tensor]


def gathering(of_equal: OfRows) -> OfRows:
    """Return a gather along the rows, with `of_equal` for all without sizes."""

    def gather(x: Tensor, group: Any, sizes: Sequence[int] | None = None, *rest: Any) -> Tensor:
        if sizes is None or group.size() == 1:
            return of_equal(x, group, sizes, *rest)
        most = max(sizes)
        equal = F.pad(x, (0, 0) * (x.dim() - 1) + (0, most - len(x)))
        padded = rows_of_ranks(equal, group)
        parts = zip(padded.split(most), sizes, strict=True)
        return torch.cat([part[:size] for part, size in parts])

    return gather


def adding(of_equal: OfRows) -> OfRows:
    """Return a sum over ranks of a rank's own rows, with `of_equal` for all without sizes."""

    def add(x: Tensor, group: Any, sizes: Sequence[int] | None = None, *rest: Any) -> Tensor:
        if sizes is None or group.size() == 1:
            return of_equal(x, group, sizes, *rest)
        whole = x.contiguous().clone()
        dist.all_reduce(whole, group=group)
        return whole.split(list(sizes))[group.rank()].clone()

    return add
