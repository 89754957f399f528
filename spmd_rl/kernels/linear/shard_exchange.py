"""ShardExchange: what ranks that share a model give each other in a forward pass."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.kernels.runtime.collectives import rows_of_ranks
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

    def sum_later(self, part: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return what `sum` returns, perhaps to be taken at its first use, by the norm it goes to.

        `part` must not change until then. No gradient is wanted.
        """
        ...

    def gather_columns(self, own: Tensor) -> Tensor:
        """Return the columns of all ranks, in their order. Shape: own [M, N]; returns [M, P N]."""
        ...


class RowExchange(ShardExchange, Protocol):
    """An exchange of a trainer's ranks, each of which may have some rows of what all have.

    They are equally many, one rank's after the other's.
    """

    def sum_rows(self, part: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return this rank's rows of what `sum` returns. Shape: part [P T, N]; returns [T, N]."""
        ...

    def rows(self, own: Tensor) -> Tensor:
        """Return the rows of all ranks. Shape: own [T, N]; returns [P T, N]."""
        ...


class TorchExchange:
    """By torch's collectives: the reference of bits. It is a `RowExchange`."""

    is_recordable: ClassVar[bool] = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def sum(self, part: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Do what `ShardExchange.sum` says. Blocks: until all ranks of the group have called.

        Each rank adds up some rows, and gives them to the others. Where there are fewer rows than
        ranks, each adds up all: that takes one exchange in place of two.
        """
        size = self.group.size()
        if len(part) < size:
            return rounded(sum_neighbours(self._gather(part)), bias, dtype)
        missing = -len(part) % size
        padded = F.pad(part, (0, 0, 0, missing)) if missing else part
        return self.rows(self.sum_rows(padded, bias, dtype))[: len(part)]

    def sum_later(self, part: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Do what `ShardExchange.sum_later` says: take the sum at once."""
        return self.sum(part, bias, dtype)

    def sum_rows(self, part: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Do what `RowExchange.sum_rows` says. Blocks: as `sum`."""
        sent = part.contiguous()
        parts = torch.empty_like(sent)
        dist.all_to_all_single(parts, sent, group=self.group)
        return rounded(sum_neighbours(parts.chunk(self.group.size())), bias, dtype)

    def rows(self, own: Tensor) -> Tensor:
        """Do what `RowExchange.rows` says. Blocks: as `sum`."""
        return rows_of_ranks(own, self.group)

    def joined(self, own: Tensor, num_rows: int) -> Tensor:
        """Return `num_rows` rows, of which each rank has equally many; the last may have fewer.

        Shape: own [t, N]; returns [num_rows, N]. Blocks: as `sum`.
        """
        missing = -(-num_rows // self.group.size()) - len(own)
        return self.rows(F.pad(own, (0, 0, 0, missing)))[:num_rows]

    def gather_columns(self, own: Tensor) -> Tensor:
        """Do what `ShardExchange.gather_columns` says. Blocks: as `sum`."""
        return torch.cat(self._gather(own), 1)

    def _gather(self, own: Tensor) -> list[Tensor]:
        found = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(found, own.contiguous(), group=self.group)
        return found


def rounded(total: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a sum plus a bias, rounded once. Shape: total [T, N] fp32, bias [N]."""
    return (total if bias is None else total + bias.float()).to(dtype)
