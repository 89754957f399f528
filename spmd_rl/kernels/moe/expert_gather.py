"""ExpertGather: an engine's experts over several ranks, each of which gets the rows of all.

Every rank computes its own experts' slots of all rows. Then each rank reads the slots of its own
tokens, and adds them in their order, as one rank with all experts does. The host need not know how
many rows go where. It suits decoding, where a rank's rows are few.

Shape letters: T rows of a rank, K experts of a token, E experts, C hidden; P ranks, and S rows of
slots that a rank's experts give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.kernels.moe.router import ExpertRoutes, in_slot_order
from spmd_rl.kernels.runtime.collectives import rows_of_ranks


class SlotRows(NamedTuple):
    """What a rank's experts give: y [S, C], and the row of each slot [P T, K], -1 for no row."""

    y: Tensor
    rows: Tensor


# from the rows of all ranks and the ids among a rank's own experts; one more is no expert of it
OwnExperts = Callable[[Tensor, ExpertRoutes], SlotRows]


class ExpertGather(Protocol):
    """The way of an engine's rows. One object serves all layers.

    All ranks of its group call `run` together, and with equally many rows.
    """

    def run(self, x: Tensor, routes: ExpertRoutes, experts: OwnExperts) -> Tensor:
        """Return the sum of what each token's experts give it; zeros for a token without experts.

        An id of E is no expert. Shape: x [T, C]; returns [T, C].
        """
        ...


class ExpertBlocks(NamedTuple):
    """Which experts each rank has: blocks of equal size, one after the other."""

    num_experts: int
    num_ranks: int

    @property
    def num_own(self) -> int:
        """Experts of a rank."""
        return self.num_experts // self.num_ranks

    def local(self, ids: Tensor, rank: int) -> Tensor:
        """Return ids among a rank's own experts; `num_own` stands for all others."""
        own = ids - rank * self.num_own
        return torch.where((own >= 0) & (own < self.num_own), own, self.num_own)


def blocks_of(group: dist.ProcessGroup, num_experts: int) -> ExpertBlocks:
    """Raises: ValueError where the ranks of `group` cannot have equally many experts."""
    if num_experts % group.size():
        raise ValueError(f"{group.size()} ranks cannot share {num_experts} experts evenly")
    return ExpertBlocks(num_experts, group.size())


class TorchGather:
    """By torch's collectives: the reference of bits. It moves more bytes than it must."""

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        """Raises: ValueError where the ranks cannot have equally many experts."""
        self._group = group
        self._blocks = blocks_of(group, num_experts)

    def run(self, x: Tensor, routes: ExpertRoutes, experts: OwnExperts) -> Tensor:
        """Do what `ExpertGather.run` says. Blocks: until all ranks of the group have called."""
        ids = self._blocks.local(rows_of_ranks(routes.ids, self._group), self._group.rank())
        weights = rows_of_ranks(routes.weights, self._group)
        y, rows = experts(rows_of_ranks(x, self._group), ExpertRoutes(ids, weights))
        is_own = (rows >= 0).unsqueeze(-1)
        own = y.new_zeros(*rows.shape, y.shape[1])
        if len(y):
            own = torch.where(is_own, y[rows.clamp(min=0).long()], own)
        found = torch.empty_like(own)
        dist.all_to_all_single(found, own, group=self._group)
        # each slot as the rank of its expert gave it
        num_tokens, per_token = routes.ids.shape
        of_ranks = found.view(self._blocks.num_ranks, num_tokens * per_token, y.shape[1])
        owner = routes.ids.flatten() // self._blocks.num_own
        slot = torch.arange(len(owner), device=owner.device)
        given = of_ranks[owner.clamp(max=self._blocks.num_ranks - 1), slot]
        given = torch.where((owner < self._blocks.num_ranks).unsqueeze(1), given, 0)
        return in_slot_order(given.view(num_tokens, per_token, x.shape[1]).float()).to(x.dtype)
