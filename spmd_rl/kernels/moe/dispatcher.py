"""EpDispatcher: rows of a mixture go to the ranks that have their experts, and come back.

Each rank has a block of experts, one after the other. What an expert gives comes back slot by slot,
and the token's own rank adds its slots in their order. So the bits of a token do not depend on how
many ranks share the experts. The backward pass goes the same ways: a token's gradient is the sum of
its slots' in their order, too.

Shape letters: T tokens, K experts of a token, S = T K slots, E experts, C hidden; P ranks, and R
rows that come to one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.kernels.moe.expert_gather import blocks_of
from spmd_rl.kernels.moe.router import ExpertRoutes
from spmd_rl.kernels.moe.slots import SlotOrder, by_expert, by_row, from_experts, to_experts
from spmd_rl.kernels.runtime.differentiable import call
from spmd_rl.kernels.runtime.first_pass import keep, kept_before


class Dispatched(NamedTuple):
    """Rows at the rank of their experts: source rank by source rank, then by expert and by token.

    `counts` has for each source rank how many rows each of this rank's experts has of it.
    `order` and `sent` are of this rank's own slots: their order, and how many went to each rank.
    `ways` is what a dispatcher keeps for the way back. Shape: rows [R, C], weights [R] fp32.
    """

    rows: Tensor
    weights: Tensor
    counts: list[list[int]]
    order: SlotOrder
    sent: list[int]
    ways: Any = None

    @property
    def received(self) -> list[int]:
        """How many rows came from each rank."""
        return [sum(of_rank) for of_rank in self.counts]


class EpDispatcher:
    """The ways of rows among the ranks of `group`, which share `num_experts` evenly.

    It has an all-to-all of rows in each direction. All ranks of the group call each method
    together. `dispatch` waits for the device, because the host must know how many rows go where.
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        """Raises: ValueError where the ranks cannot have equally many experts."""
        blocks = blocks_of(group, num_experts)
        self._group = group
        self.num_experts, self.num_ranks = blocks
        self.num_own = blocks.num_own

    @property
    def own(self) -> range:
        """The experts of this rank."""
        first = self._group.rank() * self.num_own
        return range(first, first + self.num_own)

    def dispatch(
        self, x: Tensor, routes: ExpertRoutes, meanwhile: Callable[[], object] | None = None
    ) -> Dispatched:
        """Send each slot's row to the rank of its expert, in a second pass as in the first.

        `meanwhile` is called while rows are on their way. Shape: x [T, C].
        """
        if (kept := kept_before()) is None:
            order = by_expert(routes.ids, self.num_experts)
            kept = order, self._exchanged_counts(order.counts, x.device)
            keep(kept)
        order, counts = kept
        sent = [sum(order.counts[first : first + self.num_own]) for first in self._firsts()]
        received = [sum(of_rank) for of_rank in counts]
        pending: list[dist.Work] | None = [] if meanwhile else None
        rows = call(_AllToAll, to_experts(x, order), sent, received, self._group, pending)
        weights = self._exchanged_weights(routes.weights, order, sent, received)
        if meanwhile is not None and pending is not None:
            meanwhile()
            pending.pop().wait()
        return Dispatched(rows, weights, counts, order, sent)

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """Return to each token the sum over its slots. Shape: y [R, C]; returns [T, C]."""
        ways = dispatched.received, dispatched.sent, self._group
        return from_experts(call(_AllToAll, y, *ways), dispatched.order)

    def _exchanged_weights(
        self, weights: Tensor, order: SlotOrder, sent: list[int], received: list[int]
    ) -> Tensor:
        """Return the weight of each row that comes. Shape: weights [T, K]; returns [R]."""
        ways = sent, received, self._group
        found: Tensor = call(_AllToAll, by_row(weights, order), *ways)
        return found

    def _firsts(self) -> range:
        """Return the first expert of each rank."""
        return range(0, self.num_experts, self.num_own)

    def _exchanged_counts(self, own: list[int], device: torch.device) -> list[list[int]]:
        """Return how many rows come from each rank for each expert of this one."""
        sent = torch.tensor(own, dtype=torch.int64, device=device)
        found = torch.empty_like(sent)
        dist.all_to_all_single(found, sent, group=self._group)
        return found.view(self.num_ranks, self.num_own).tolist()


class _AllToAll(torch.autograd.Function):
    """An all-to-all of rows; that of their gradients is the other way.

    With a list `pending`, rows are there once the work that it then has is done.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        sent: list[int],
        received: list[int],
        group: dist.ProcessGroup,
        pending: list[dist.Work] | None = None,
    ) -> Tensor:
        ctx.ways = sent, received, group
        return _exchanged(x, sent, received, group, pending)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        sent, received, group = ctx.ways
        return _exchanged(grads[0], received, sent, group), None, None, None, None


def _exchanged(
    x: Tensor,
    sent: list[int],
    received: list[int],
    group: dist.ProcessGroup,
    pending: list[dist.Work] | None = None,
) -> Tensor:
    found = x.new_empty(sum(received), *x.shape[1:])
    is_late = pending is not None
    work = dist.all_to_all_single(
        found, x.contiguous(), received, sent, group=group, async_op=is_late
    )
    if pending is not None and work is not None:
        pending.append(work)
    return found
