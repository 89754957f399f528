"""ShardExchange: what ranks that share a model give each other in a forward pass."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.kernels.runtime.neighbour_sums import sum_neighbours


class ShardExchange(Protocol):
    """The way of partial sums and logits. One object serves all layers.

    All ranks of its group call each method together, with equal shapes.
    """

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum over ranks: neighbours are added, then neighbours of these sums.

        It may overwrite `part`. Shape: [T, N] fp32.
        """
        ...

    def gather_columns(self, own: Tensor) -> Tensor:
        """Return the columns of all ranks, in their order. Shape: own [M, N]; returns [M, P N]."""
        ...


class TorchExchange:
    """By torch's collectives, whose ranks get all parts: the reference of bits."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def sum(self, part: Tensor) -> Tensor:
        """Do what `ShardExchange.sum` says. Blocks: until all ranks of the group have called."""
        return sum_neighbours(self._gather(part))

    def gather_columns(self, own: Tensor) -> Tensor:
        """Do what `ShardExchange.gather_columns` says. Blocks: as `sum`."""
        return torch.cat(self._gather(own), 1)

    def _gather(self, own: Tensor) -> list[Tensor]:
        found = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(found, own.contiguous(), group=self._group)
        return found
