"""ShardExchange: what ranks that share a model give each other in a forward pass."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.kernels.runtime.neighbour_sums import sum_neighbours


class ShardExchange(Protocol):
    """The way of partial sums, and of what ranks draw from. One object serves all layers.

    All ranks of its group call each method together, with equal shapes. Where it `is_recordable`,
    the host does not wait, so that calls can be part of a recorded graph.
    """

    @property
    def is_recordable(self) -> bool: ...

    def sum(self, part: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the sum over ranks, plus a bias, rounded once.

        Neighbours are added, then neighbours of these sums. It may overwrite `part`.
        Shape: part [T, N] fp32, bias [N]; returns [T, N] in `dtype`.
        """
        ...

    def gather_columns(self, own: Tensor) -> Tensor:
        """Return the columns of all ranks, in their order. Shape: own [M, N]; returns [M, P N]."""
        ...


class TorchExchange:
    """By torch's collectives, whose ranks get all parts: the reference of bits."""

    is_recordable: ClassVar[bool] = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def sum(self, part: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Do what `ShardExchange.sum` says. Blocks: until all ranks of the group have called.

        Where ranks can have equally many rows, each adds up some, and gives them to the others.
        """
        size = self._group.size()
        if len(part) % size:
            return rounded(sum_neighbours(self._gather(part)), bias, dtype)
        parts = torch.empty_like(part)
        dist.all_to_all_single(parts, part.contiguous(), group=self._group)
        own = rounded(sum_neighbours(parts.chunk(size)), bias, dtype)
        out = own.new_empty(part.shape)
        dist.all_gather_into_tensor(out, own, group=self._group)
        return out

    def gather_columns(self, own: Tensor) -> Tensor:
        """Do what `ShardExchange.gather_columns` says. Blocks: as `sum`."""
        return torch.cat(self._gather(own), 1)

    def _gather(self, own: Tensor) -> list[Tensor]:
        found = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(found, own.contiguous(), group=self._group)
        return found


def rounded(total: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a sum plus a bias, rounded once. Shape: total [T, N] fp32, bias [N]."""
    return (total if bias is None else total + bias.float()).to(dtype)
