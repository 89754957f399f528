"""DeepEpDispatcher: DeepEP brings each row once to every rank that has experts of it.

What experts give comes back slot by slot, by DeepEP too, and the token's rank adds the slots in
their order. Both are copies, so the bits are those of `EpDispatcher`, forward and backward.
DeepEP's own combine is not used: it adds what each rank has summed and rounded.

Shape letters: T tokens, K experts of a token, E experts, C hidden; P ranks, and R rows of slots
that come to one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.kernels.moe.deep_ep_buffer import (
    ArrivedRows,
    DeepEpBuffer,
    RankWants,
    Way,
    check_deep_ep,
)
from spmd_rl.kernels.moe.dispatcher import Dispatched, EpDispatcher
from spmd_rl.kernels.moe.router import ExpertRoutes, in_slot_order
from spmd_rl.kernels.moe.slots import SlotOrder, by_expert
from spmd_rl.kernels.runtime.differentiable import call
from spmd_rl.kernels.runtime.first_pass import keep, kept_before


@dataclass
class Ways:
    """The ways of one pass's rows to their experts and back.

    `places` has for each row of a slot the received row that it is a copy of. Shape: [R] int64.
    """

    buffer: DeepEpBuffer
    there: Way
    places: Tensor
    order: SlotOrder
    received: list[int]
    back: Way | None = None

    def spread(self, x: Tensor) -> Tensor:
        """Return the rows of slots at their experts' rank. Shape: x [T, C]; returns [R, C]."""
        return self.buffer.send_again(x, self.there)[self.places]

    def collect(self, y: Tensor) -> Tensor:
        """Return each token's sum over its slots. Shape: y [R, C]; returns [T, C]."""
        if self.back is None:
            rows, _, _, self.back = self._first_back(y)
        else:
            rows = self.buffer.send_again(y, self.back)
        return in_slot_order(rows[self.order.rows].float()).to(y.dtype)

    def _first_back(self, y: Tensor) -> ArrivedRows:
        """Send rows of slots to the ranks of their tokens, as if these were experts."""
        per_rank = torch.tensor(self.received, dtype=torch.int32, device=y.device)
        ranks = torch.arange(len(self.received), device=y.device)
        owner = ranks.repeat_interleave(per_rank, output_size=len(y)).unsqueeze(1)
        layout = RankWants(per_rank, per_rank, owner == ranks)
        return self.buffer.send(y, owner, layout, len(self.order.slots))


class DeepEpDispatcher(EpDispatcher):
    """`EpDispatcher` with DeepEP between the 2, 4 or 8 GPUs of a host."""

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        """Raises: ConfigError where DeepEP cannot run; ValueError as `EpDispatcher` does."""
        super().__init__(group, num_experts)
        check_deep_ep(group.size())
        self._buffer: DeepEpBuffer | None = None

    def dispatch(
        self, x: Tensor, routes: ExpertRoutes, meanwhile: Callable[[], object] | None = None
    ) -> Dispatched:
        """Do what `EpDispatcher.dispatch` does. The first one makes DeepEP's memory.

        DeepEP's kernels take the stream of all others, so `meanwhile` is called behind them.
        """
        if self._buffer is None:
            self._buffer = DeepEpBuffer(self._group, x.shape[1] * x.element_size())
        if (kept := kept_before()) is None:
            ways, counts, arrived = self._first_ways(self._buffer, x, routes)
            keep((ways, counts))
        else:
            ways, counts = kept
            arrived = self._buffer.send_again(x.detach(), ways.there)
        order = ways.order
        sent = [sum(order.counts[first : first + self.num_own]) for first in self._firsts()]
        rows = call(_Spread, x, arrived, ways)
        weights = self._exchanged_weights(routes.weights, order, sent, ways.received)
        if meanwhile is not None:
            meanwhile()
        return Dispatched(rows, weights, counts, order, sent, ways)

    def _first_ways(
        self, buffer: DeepEpBuffer, x: Tensor, routes: ExpertRoutes
    ) -> tuple[Ways, list[list[int]], Tensor]:
        """Send rows, and return their ways, how many came for each expert, and the rows that came.

        Shape: x [T, C]; the rows are not repeated for slots.
        """
        layout = buffer.layout(routes.ids, self.num_experts)
        order = by_expert(routes.ids, self.num_experts)
        counts, num_rows = self._coming(layout)
        there = buffer.send(x.detach(), routes.ids, layout, num_rows)
        received = [sum(of_rank) for of_rank in counts]
        return Ways(buffer, there.way, _places(there, counts), order, received), counts, there.rows

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """Return to each token the sum over its slots. Shape: y [R, C]; returns [T, C]."""
        out: Tensor = call(_Collect, y, dispatched.ways)
        return out

    def _coming(self, layout: RankWants) -> tuple[list[list[int]], int]:
        """Return the rows that come from each rank for each expert of this one, and the tokens."""
        per_expert = layout.per_expert.view(self.num_ranks, self.num_own)
        sent = torch.cat([per_expert, layout.per_rank.unsqueeze(1)], 1)
        found = torch.empty_like(sent)
        dist.all_to_all_single(found, sent, group=self._group)
        rows = found.tolist()
        return [counts for *counts, _ in rows], sum(tokens for *_, tokens in rows)


def _places(there: ArrivedRows, counts: list[list[int]]) -> Tensor:
    """Return the received row of each slot: by source rank, then by expert, then by token."""
    num_ranks, num_own = len(counts), len(counts[0])
    key = torch.where(there.ids >= 0, there.sources.unsqueeze(1) * num_own + there.ids, -1)
    key = torch.where(key >= 0, key, num_ranks * num_own).flatten()  # others come last
    slots = key.argsort(stable=True)[: sum(map(sum, counts))]
    return slots // there.ids.shape[1]


class _Spread(torch.autograd.Function):
    """Rows that were sent, once for each slot; their gradients are summed where they came from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, received: Tensor, ways: Ways) -> Tensor:
        ctx.ways = ways
        return received[ways.places]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ways.collect(grads[0]), None, None


class _Collect(torch.autograd.Function):
    """Sums over slots at the tokens' ranks; their gradients go the way of the tokens."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, ways: Ways) -> Tensor:
        ctx.ways = ways
        return ways.collect(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.ways.spread(grads[0]), None
