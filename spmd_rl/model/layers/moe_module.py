"""Torch module of a mixture of experts.

A token's output is the sum of what its experts give it. `moe.MOE_RULE` names where bits are
rounded. Router logits are fp32. The weight of an expert multiplies the fp32 sums of its down
projection, which are then rounded once. A token's slots are added in fp32 in the order of its
experts' ids, and rounded once. What every token takes is rounded by itself,
and added. A token's bits depend on no other token, nor on where experts lie.

On a GPU that keeps the contract, all experts are multiplied at once and the host does not wait.
Elsewhere one expert follows the other, which is the oracle of the former.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmd_rl.kernels import is_exact, linear_fp32, pad_rows, unpad_rows
from spmd_rl.kernels.low_precision.products import whole
from spmd_rl.kernels.moe.dispatcher import EpDispatcher
from spmd_rl.kernels.moe.expert_addresses import KeptAddresses
from spmd_rl.kernels.moe.kept_routes import keep_routes
from spmd_rl.kernels.moe.route_hash import note_routes
from spmd_rl.kernels.moe.router import ExpertRoutes, route
from spmd_rl.kernels.moe.sigmoid_router import route_by_sigmoid
from spmd_rl.kernels.moe.slots import by_expert, from_experts, to_experts
from spmd_rl.kernels.moe.symm_gather import RowSizes, SymmGather
from spmd_rl.kernels.rowwise.activation import sigmoid_mul
from spmd_rl.kernels.runtime.first_pass import keep, kept_before
from spmd_rl.model.layers.expert_loads import ExpertLoads
from spmd_rl.model.layers.fixed_parameters import HoldsFixed
from spmd_rl.model.layers.mlp import PROJECTIONS
from spmd_rl.model.layers.mlp_module import GatedMlp
from spmd_rl.model.layers.route_replay import RouteReplay
from spmd_rl.model.layers.sigmoid_router import CORRECTION, SigmoidRouter
from spmd_rl.model.layers.split_experts import SplitExperts
from spmd_rl.model.linear import Linear
from spmd_rl.model.parts.part import WHOLE, ModelPart

LEAST_ROWS = 8  # of a weight that the contract's kernel multiplies with

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from spmd_rl.kernels.moe.adapted_experts import Projection


class CorrectedGate(HoldsFixed, Linear):
    """A router whose choice has a correction of each expert, which no optimizer changes."""

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__(hidden_size, num_experts, bias=False)
        self.fix(CORRECTION, num_experts)


class MoeMlp(nn.Module):
    """Experts, of which each token takes `experts_per_token`, and the router that chooses them."""

    def __init__(
        self,
        *,
        hidden_size: int,
        num_experts: int,
        experts_per_token: int,
        expert_size: int,
        normalizes_weights: bool,
        shared_size: int,
        sigmoid: SigmoidRouter | None,
        shared_gate: bool,
        biases: bool,
        limit: float,
    ) -> None:
        super().__init__()
        self.experts_per_token = experts_per_token
        self.normalizes_weights = normalizes_weights
        self.sigmoid, self.limit = sigmoid, limit
        self.scores, self.chosen = nn.Identity(), nn.Identity()  # what the microscope watches
        self.loads: ExpertLoads | None = None  # counts the tokens of a trainer's pass
        self.replay: RouteReplay | None = None  # of what an engine recorded, in a trainer's pass
        self.part: ModelPart = WHOLE  # of the model that other ranks share
        gate = Linear(hidden_size, num_experts, bias=biases)
        self.gate = CorrectedGate(hidden_size, num_experts) if sigmoid else gate
        self.num_experts = num_experts
        self.experts = nn.ModuleList(
            GatedMlp(hidden_size, expert_size, biases, limit) for _ in range(num_experts)
        )
        shared = GatedMlp(hidden_size, shared_size, bias=False) if shared_size else None
        self.shared_experts = None if shared_gate else shared
        self.shared_expert = shared if shared_gate else None  # folders call it so with a gate
        self.shared_expert_gate = Linear(hidden_size, 1, bias=False) if shared_gate else None
        self._kept = KeptAddresses()

    def forward(self, x: Tensor) -> Tensor:
        """Shape: [T, C] to [T, C]; in a part of a trainer's model, to this rank's rows of it.

        All ranks that share a model choose for all rows, and have experts compute their own.
        """
        logits = linear_fp32(x, self.gate.weight)
        if self.gate.bias is not None:
            logits = logits + self.gate.bias.float()
        logits = self.scores(logits)
        if is_exact(x):
            return self.all_at_once(x, logits)
        return self.one_by_one(x, self._chosen(logits, self._noted, self._routes_to))

    def all_at_once(self, x: Tensor, logits: Tensor) -> Tensor:
        """Choose experts and compute what they give, in kernels for all of them.

        Shape: x [T, C], logits [T, E]; returns [T, C].
        """
        from spmd_rl.kernels.moe.adapted_experts import AdaptedExperts, adapted_output
        from spmd_rl.kernels.moe.experts import ExpertWeights, experts_output

        def routed(x: Tensor, routes: ExpertRoutes) -> Tensor:
            projections = [self._projection(name) for name in PROJECTIONS]
            if all(one.is_plain for one in projections):
                weights = ExpertWeights(*(one.weights for one in projections))
                return experts_output(x, routes, weights, self._kept)
            gate, up, down = projections
            experts = AdaptedExperts(gate, up, down, self.limit)
            return adapted_output(x, routes, experts, self._kept)

        routes = self._chosen(logits, self._watched_at_once, self.weighted_at_once)
        return self._with_shared(x, routes, routed)

    def routes_at_once(self, logits: Tensor) -> ExpertRoutes:
        """Choose experts on a GPU and hash the routes; padding goes to none. Shape: [T, E]."""
        from spmd_rl.kernels.moe.route_triton import note_on_gpu, route_on_gpu, without_padding

        if self.sigmoid is None:
            return route_on_gpu(logits, self.experts_per_token, normalizes=self.normalizes_weights)
        routes = self._route(logits)
        note_on_gpu(routes.ids)
        return without_padding(routes, logits.shape[1])

    def weighted_at_once(self, logits: Tensor, ids: Tensor) -> ExpertRoutes:
        """Take these experts on a GPU. Shape: logits [T, E], ids [T, K] int64, ascending."""
        from spmd_rl.kernels.moe.route_triton import weights_on_gpu

        if self.sigmoid is not None:
            return self._routes_to(logits, ids)
        return ExpertRoutes(ids, weights_on_gpu(logits, ids, normalizes=self.normalizes_weights))

    def one_by_one(self, x: Tensor, routes: ExpertRoutes) -> Tensor:
        """Return what the experts of these routes give, one after the other. Waits for the device.

        Shape: x [T, C]; returns [T, C].
        """
        return self._with_shared(x, routes, self._routed_one_by_one)

    def _routed_one_by_one(self, x: Tensor, routes: ExpertRoutes) -> Tensor:
        order = by_expert(routes.ids, len(self.experts))
        weights = routes.weights.flatten()[order.slots].split(order.counts)
        rows = to_experts(x, order).split(order.counts)
        # An expert without tokens has gradients too, as it may have tokens on another rank.
        some = [
            (expert, of_expert, weight)
            for expert, of_expert, weight in zip(self.experts, rows, weights, strict=True)
            if len(of_expert) or torch.is_grad_enabled()
        ]
        return from_experts(torch.cat([_weighted(*one) for one in some]), order)

    def split(self, group: ProcessGroup, dispatcher: EpDispatcher | None = None) -> None:
        """Keep this rank's block of the experts, which the ranks of `group` share.

        Rows take the ways of `dispatcher`, or else torch's collectives.
        """
        ways = dispatcher or EpDispatcher(group, self.num_experts)
        self.experts = SplitExperts(self.experts, ways)

    def _with_shared(
        self, x: Tensor, routes: ExpertRoutes, routed: Callable[[Tensor, ExpertRoutes], Tensor]
    ) -> Tensor:
        """Return what experts give, plus what every token takes.

        `routed` computes the former where this rank has all experts. Where ranks share them, the
        latter is computed while rows are on their way.
        """
        shared, given = self._shared, list[Tensor]()
        own = self._own_rows(len(x))
        rows = x[own], ExpertRoutes(routes.ids[own], routes.weights[own])
        if not isinstance(self.experts, SplitExperts):
            output = routed(*rows)
        else:
            meanwhile = None if shared is None else lambda: given.append(shared(x))
            output = self.experts(*rows, meanwhile)
        if self.part.count > 1 and not self.part.trains:
            output = self.part.joined_rows(output, len(x))
        if shared is None:
            return output
        return output + (given.pop() if given else shared(x))

    @property
    def _shared(self) -> Callable[[Tensor], Tensor] | None:
        """What gives each row what every token takes; None for nothing."""
        return self.shared_experts if self.shared_expert_gate is None else self._by_gate

    def _by_gate(self, x: Tensor) -> Tensor:
        assert self.shared_expert is not None and self.shared_expert_gate is not None
        weight = self.shared_expert_gate.weight
        if is_exact(x):
            gate = linear_fp32(x, F.pad(weight, (0, 0, 0, LEAST_ROWS - 1)))[:, :1]
        else:
            # a product with one column could be another kernel's for other numbers of rows
            gate = (x.float() * weight.float()).sum(-1, keepdim=True)
        return sigmoid_mul(self.shared_expert(x), gate)

    def _own_rows(self, num_rows: int) -> slice:
        """Return the rows for which this rank has experts compute."""
        return slice(None) if self.part.count == 1 else self.part.own_rows(num_rows)

    def _chosen(
        self,
        logits: Tensor,
        own: Callable[[Tensor], ExpertRoutes],
        weighted: Callable[[Tensor, Tensor], ExpertRoutes],
    ) -> ExpertRoutes:
        """Return the router's own routes, or those that are replayed; keep and count them.

        A pass that is computed again takes the experts that it took first.
        """
        ids, replay = kept_before(), self.replay
        if ids is None and replay is not None:
            with torch.no_grad():
                ids = replay.experts_of(self, own(logits).ids)
        routes = own(logits) if ids is None else weighted(logits, ids)
        keep(routes.ids)
        keep_routes(routes.ids)
        if self.loads is not None:
            self.loads.add(self, self._with_own_gradient(logits), routes.ids.long())
        return routes

    def _with_own_gradient(self, logits: Tensor) -> Tensor:
        """Return the logits, whose gradient is that of the rows of this part of the model alone."""
        if self.part.count == 1:
            return logits
        own = self._own_rows(len(logits))
        before, after = logits[: own.start].detach(), logits[own.stop :].detach()
        return torch.cat([before, logits[own], after])

    def _watched(self, routes: ExpertRoutes) -> ExpertRoutes:
        """Return the routes, or those that whoever watches `chosen` puts in their place."""
        if not self.chosen._forward_hooks:
            return routes
        packed = torch.cat([routes.ids.float(), routes.weights], 1)
        ids, weights = self.chosen(packed).chunk(2, 1)
        return ExpertRoutes(ids.to(routes.ids.dtype), weights.contiguous())

    @property
    def takes_all(self) -> bool:
        """Whether every token takes every expert."""
        return self.experts_per_token == self.num_experts

    def _route(self, logits: Tensor) -> ExpertRoutes:
        """Choose experts. Shape: logits [T, E] fp32."""
        return self._routes_to(logits, None)

    def _noted(self, logits: Tensor) -> ExpertRoutes:
        """Choose experts and hash the routes. Shape: logits [T, E] fp32."""
        routes = self._watched(self._route(logits))
        note_routes(routes.ids)
        return routes

    def _watched_at_once(self, logits: Tensor) -> ExpertRoutes:
        """Do the same on a GPU."""
        return self._watched(self.routes_at_once(logits))

    def _routes_to(self, logits: Tensor, ids: Tensor | None) -> ExpertRoutes:
        """Return these experts with their weights, or those that are chosen without `ids`."""
        if self.sigmoid is None:
            chosen, normalizes = self.experts_per_token, self.normalizes_weights
            return route(logits, chosen, normalizes=normalizes, ids=ids)
        return route_by_sigmoid(
            logits,
            getattr(self.gate, CORRECTION),
            self.experts_per_token,
            groups=(self.sigmoid.num_groups, self.sigmoid.num_chosen_groups),
            normalizes=self.normalizes_weights,
            scale=self.sigmoid.scale,
            ids=ids,
        )

    def weights(self, name: str) -> list[Tensor]:
        """Return the weight of all experts' projection `name`."""
        return [getattr(expert, name).weight for expert in self.experts]

    def take_part(self) -> None:
        """Take part in one pass of the ranks that share these experts, without a token."""
        like = self.gate.weight
        ids = torch.empty(0, self.experts_per_token, dtype=torch.int64, device=like.device)
        routes = ExpertRoutes(ids, torch.empty(ids.shape, device=like.device))
        self.experts(like.new_empty(0, like.shape[1]), routes)

    def _projection(self, name: str) -> Projection:
        from spmd_rl.kernels.moe.adapted_experts import Projection

        layers: list[Linear] = [getattr(expert, name) for expert in self.experts]
        weights, pairs = [one.operand for one in layers], [one.adapter for one in layers]
        adapters = [pair for pair in pairs if pair is not None]
        if not adapters:
            biases = None if layers[0].bias is None else [one.bias for one in layers]
            return Projection(name, weights, None, None, 1.0, biases)
        a, b = zip(*adapters, strict=True)
        return Projection(name, weights, a, b, layers[0].scale)


def mixtures(model: nn.Module) -> list[MoeMlp]:
    """Return the mixtures of a model, in the order in which a pass comes to them."""
    return [one for one in model.modules() if isinstance(one, MoeMlp)]


def gather_of(model: nn.Module, group: ProcessGroup, max_rows: int) -> SymmGather:
    """Return the way of decoding rows that all mixtures of a model can take (`SymmGather`)."""
    first = mixtures(model)[0]
    weight = first.gate.weight
    sizes = RowSizes(weight.shape[1], first.experts_per_token, weight.dtype)
    return SymmGather(group, first.num_experts, max_rows, sizes)


def shares_experts(model: nn.Module) -> bool:
    """Whether other ranks have some of a model's experts, so that the host waits for them."""
    return any(isinstance(one.experts, SplitExperts) for one in mixtures(model))


def _weighted(expert: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """Return what an expert gives its rows, times their weights. Shape: x [M, C], weight [M]."""
    assert isinstance(expert, GatedMlp)
    tall = x if is_exact(x) else pad_rows(x)
    hidden = expert.hidden(tall)
    down = expert.down_proj
    if down.is_adapted:
        product = down(hidden).float()
    else:
        product = linear_fp32(hidden, whole(down.operand, hidden.dtype))
        if down.bias is not None:
            product = product + down.bias.float()
    return (unpad_rows(product, len(x)) * weight.unsqueeze(1)).to(x.dtype)
