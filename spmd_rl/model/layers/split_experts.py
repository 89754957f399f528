"""Experts of a mixture over several ranks, each of which has a block of them.

A weight's gradient has one chain for the rows of each source rank, in the order of their tokens, as
if that rank had the expert. These gradients are added in float32, neighbours first
(`neighbour_sums.py`). So it has the same bits for any power of two of ranks that share experts, as
long as data is split over the same number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spmd_rl.kernels import is_exact, linear_fp32, pad_rows, silu_mul, unpad_rows
from spmd_rl.kernels.low_precision.products import whole
from spmd_rl.kernels.moe.dispatcher import Dispatched, EpDispatcher
from spmd_rl.kernels.moe.expert_addresses import KeptAddresses
from spmd_rl.kernels.moe.expert_gather import ExpertGather, SlotRows
from spmd_rl.kernels.moe.router import ExpertRoutes
from spmd_rl.kernels.moe.slots import by_expert, to_experts
from spmd_rl.kernels.runtime.neighbour_sums import sum_neighbours
from spmd_rl.model.layers.mlp import PROJECTIONS
from spmd_rl.model.linear import Factors, Linear

if TYPE_CHECKING:
    from spmd_rl.kernels.moe.adapted_experts import Projection


Copies = Sequence[Sequence[Factors]]  # for each source rank, those of each own expert


class SplitExperts(nn.ModuleList):
    """The experts of a layer that this rank has, under the numbers that they have among all.

    The ranks of the dispatcher call it together, each with its own tokens. Within `gathering` rows
    take another way. Then all ranks have equally many.
    """

    def __init__(self, experts: nn.ModuleList, dispatcher: EpDispatcher) -> None:
        super().__init__()
        self.dispatcher = dispatcher
        for number in self.dispatcher.own:
            self.add_module(str(number), experts[number])
        self.gather: ExpertGather | None = None
        self._kept, self._kept_of_gather = KeptAddresses(), KeptAddresses()

    def forward(
        self, x: Tensor, routes: ExpertRoutes, meanwhile: Callable[[], object] | None = None
    ) -> Tensor:
        """Return the sum of what each token's experts give it, whatever ranks have them.

        `meanwhile` is called while rows are on their way. Shape: x [T, C]; returns [T, C].
        """
        if self.gather is not None:
            if meanwhile is not None:
                meanwhile()
            return self.gather.run(x, routes, self._own_slots)
        sent = self.dispatcher.dispatch(x, routes, meanwhile)
        projections = [self._copies(name, x.dtype) for name in PROJECTIONS]
        if is_exact(x):
            y = _at_once(sent, projections, self._kept)
        else:
            y = _one_by_one(sent, projections)
        return self.dispatcher.combine(y, sent)

    def _own_slots(self, x: Tensor, routes: ExpertRoutes) -> SlotRows:
        """Return what this rank's experts give the rows of all ranks (`expert_gather`)."""
        layers = [self._layers(name) for name in PROJECTIONS]
        if not is_exact(x):
            factors = [[one.factors_in(x.dtype) for one in own] for own in layers]
            return _slots_one_by_one(x, routes, factors)
        from spmd_rl.kernels.moe.experts import ExpertWeights, order_slots, slots_output

        weights = [[one.operand_in(x.dtype) for one in own] for own in layers]
        order = order_slots(routes, len(weights[0]))
        own, kept = ExpertWeights(*weights), self._kept_of_gather
        y = slots_output(x, order, routes.weights, own, kept)
        return SlotRows(y, order.rows)

    def _copies(self, name: str, dtype: torch.dtype) -> Copies:
        """Return a projection's weights in `dtype`, once for each source rank."""
        layers, num_ranks = self._layers(name), self.dispatcher.num_ranks
        if not torch.is_grad_enabled():
            return [[one.factors_in(dtype) for one in layers]] * num_ranks
        copies = (_factors_of_sources(one, num_ranks, dtype) for one in layers)
        return list(zip(*copies, strict=True))

    def _layers(self, name: str) -> list[Linear]:
        """Return the projection `name` of each own expert."""
        return [getattr(expert, name) for expert in self]


@contextmanager
def gathering(model: nn.Module, gather: ExpertGather) -> Iterator[None]:
    """Within, rows go to the experts of a model and back by `gather`. No gradients."""
    layers = [one for one in model.modules() if isinstance(one, SplitExperts)]
    for layer in layers:
        layer.gather = gather
    try:
        yield
    finally:
        for layer in layers:
            layer.gather = None


class _ForSources(torch.autograd.Function):
    """A parameter for the rows of each source rank, `rounded` for a pass.

    Its gradient is the sum over them, in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, rounded: Tensor, num_sources: int
    ) -> tuple[Tensor, ...]:
        return tuple(rounded.detach() for _ in range(num_sources))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        parts = (
            torch.stack(grads).float() if grads[0].dtype != torch.float32 else torch.stack(grads)
        )
        return sum_neighbours(parts.unbind()), None, None


def _factors_of_sources(layer: Linear, num_sources: int, dtype: torch.dtype) -> list[Factors]:
    """Return what a pass in `dtype` multiplies with, for the rows of each source rank."""
    tensors, scale = layer.factors_in(dtype)
    pairs = zip(layer.factors, tensors, strict=True)
    copies = (_ForSources.apply(own, whole(one, dtype), num_sources) for own, one in pairs)
    return [Factors(of_source, scale) for of_source in zip(*copies, strict=True)]


def _one_by_one(sent: Dispatched, projections: Sequence[Copies]) -> Tensor:
    """Return what experts give their rows, one after the other. Shape: [R, C]."""
    counts = list(chain.from_iterable(sent.counts))
    of_groups = (chain.from_iterable(copies) for copies in projections)
    groups = zip(sent.rows.split(counts), sent.weights.split(counts), *of_groups, strict=True)
    # An expert without rows has gradients too, as it may have rows on another rank.
    given = [_weighted(*one) for one in groups if len(one[0]) or torch.is_grad_enabled()]
    return torch.cat([sent.rows[:0], *given])


def _slots_one_by_one(x: Tensor, routes: ExpertRoutes, factors: Copies) -> SlotRows:
    """Return what experts give the slots that are theirs, one after the other.

    `factors` are those of each own expert, projection by projection.
    """
    num_own = len(factors[0])
    order = by_expert(routes.ids, num_own + 1)
    scales = routes.weights.flatten()[order.slots].split(order.counts)
    rows = to_experts(x, order).split(order.counts)
    groups = zip(rows, scales, *factors, strict=False)  # the last rows are of no own expert
    y = torch.cat([x[:0], *(_weighted(*one) for one in groups if len(one[0]))])
    return SlotRows(y, torch.where(routes.ids < num_own, order.rows, -1))


def _weighted(x: Tensor, weight: Tensor, gate: Factors, up: Factors, down: Factors) -> Tensor:
    """Return what an expert gives its rows, times their weights. Shape: x [M, C], weight [M]."""
    tall = x if is_exact(x) else pad_rows(x)
    hidden = silu_mul(gate.product(tall), up.product(tall))
    weight_alone, *beside = down.tensors
    if beside:
        product = down.product(hidden).float()
    else:
        product = linear_fp32(hidden, whole(weight_alone, x.dtype))
    return (unpad_rows(product, len(x)) * weight.unsqueeze(1)).to(x.dtype)


def _at_once(sent: Dispatched, projections: Sequence[Copies], kept: KeptAddresses) -> Tensor:
    """Return what experts give their rows, in kernels for all of them. Shape: [R, C].

    The rows of an expert that came from one rank are those of one weight in the kernels' table.
    """
    from spmd_rl.kernels.moe.adapted_experts import AdaptedExperts, adapted_output
    from spmd_rl.kernels.moe.experts import ExpertWeights, experts_output

    counts = torch.tensor(list(chain.from_iterable(sent.counts)))
    ids = torch.arange(len(counts)).repeat_interleave(counts).to(sent.rows.device)
    x, weights = sent.rows, sent.weights
    if not len(x):  # kernels have at least one row; here it is one of no expert
        x, weights = (
            torch.cat([x, x.new_zeros(1, x.shape[1])]),
            torch.cat([weights, weights.new_zeros(1)]),
        )
        ids = ids.new_full((1,), len(counts))
    routes = ExpertRoutes(ids.unsqueeze(1), weights.unsqueeze(1))
    flat = [list(chain.from_iterable(copies)) for copies in projections]
    if all(len(one.tensors) == 1 for factors in flat for one in factors):
        own = ExpertWeights(*([one.tensors[0] for one in factors] for factors in flat))
        return experts_output(x, routes, own, kept)[: len(sent.rows)]
    gate, up, down = map(_projection, PROJECTIONS, flat)
    adapted = AdaptedExperts(gate, up, down)
    return adapted_output(x, routes, adapted, kept)[: len(sent.rows)]


def _projection(name: str, factors: Sequence[Factors]) -> Projection:
    from spmd_rl.kernels.moe.adapted_experts import Projection

    weights, *beside = zip(*(one.tensors for one in factors), strict=True)
    a, b = beside or (None, None)
    return Projection(name, weights, a, b, factors[0].scale)
