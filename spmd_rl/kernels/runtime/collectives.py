"""Collectives of torch whose names changed: 2.13 warns of the names that 2.11 has alone."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def rows_of_ranks(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks, in the order of ranks.

    Shape: own [T, ...], as many on each rank; returns [P T, ...]. Ranks: all of the group. Blocks:
    as its collectives do.
    """
    out = own.new_empty(group.size() * len(own), *own.shape[1:])
    _gather(out, own.contiguous(), group=group)
    return out
