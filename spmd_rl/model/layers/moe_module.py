"""Torch module of a mixture of experts.

A token's output is the sum of what its experts give it. `moe.MOE_RULE` names where bits are
rounded. Router logits are fp32. The weight of an expert multiplies the fp32 sums of its down
projection, which are then rounded once. A token's slots are added in fp32 in the order of its
experts' ids, and rounded once. What every token takes is rounded by itself,
and added. A token's bits depend on no other token, nor on where experts lie.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spmd_rl.kernels import is_exact, linear_fp32, pad_rows, unpad_rows
from spmd_rl.kernels.moe.route_hash import note_routes
from spmd_rl.kernels.moe.router import ExpertRoutes, route
from spmd_rl.kernels.moe.sigmoid_router import route_by_sigmoid
from spmd_rl.kernels.moe.slots import by_expert, from_experts, to_experts
from spmd_rl.model.fused_projections import project_gated
from spmd_rl.model.layers.expert_loads import ExpertLoads
from spmd_rl.model.layers.fixed_parameters import HoldsFixed
from spmd_rl.model.layers.mlp_module import GatedMlp
from spmd_rl.model.layers.sigmoid_router import CORRECTION, SigmoidRouter
from spmd_rl.model.linear import Linear


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
    ) -> None:
        super().__init__()
        self.experts_per_token = experts_per_token
        self.normalizes_weights = normalizes_weights
        self.sigmoid = sigmoid
        self.loads: ExpertLoads | None = None  # counts the tokens of a trainer's pass
        self.gate = (
            CorrectedGate(hidden_size, num_experts)
            if sigmoid
            else Linear(hidden_size, num_experts, bias=False)
        )
        self.experts = nn.ModuleList(
            GatedMlp(hidden_size, expert_size, bias=False) for _ in range(num_experts)
        )
        self.shared_experts = (
            GatedMlp(hidden_size, shared_size, bias=False) if shared_size else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """Shape: [T, C] to [T, C]."""
        logits = linear_fp32(x, self.gate.weight)
        routes = self._route(logits)
        note_routes(routes.ids)
        if self.loads is not None:
            self.loads.add(self, logits, routes.ids)
        order = by_expert(routes.ids, len(self.experts))
        weights = routes.weights.flatten()[order.slots].split(order.counts)
        rows = to_experts(x, order).split(order.counts)
        # An expert without tokens has gradients too, as it may have tokens on another rank.
        some = [
            (expert, of_expert, weight)
            for expert, of_expert, weight in zip(self.experts, rows, weights, strict=True)
            if len(of_expert) or torch.is_grad_enabled()
        ]
        routed = from_experts(torch.cat([_weighted(*one) for one in some]), order)
        return routed if self.shared_experts is None else routed + self.shared_experts(x)

    def _route(self, logits: Tensor) -> ExpertRoutes:
        """Shape: logits [T, E] fp32."""
        if self.sigmoid is None:
            return route(logits, self.experts_per_token, normalizes=self.normalizes_weights)
        return route_by_sigmoid(
            logits,
            getattr(self.gate, CORRECTION),
            self.experts_per_token,
            groups=(self.sigmoid.num_groups, self.sigmoid.num_chosen_groups),
            normalizes=self.normalizes_weights,
            scale=self.sigmoid.scale,
        )


def _weighted(expert: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """Return what an expert gives its rows, times their weights. Shape: x [M, C], weight [M]."""
    assert isinstance(expert, GatedMlp)
    tall = x if is_exact(x) else pad_rows(x)
    hidden = project_gated(tall, expert.joined, expert.gate_proj, expert.up_proj)
    down = expert.down_proj
    product = down(hidden).float() if down.is_adapted else linear_fp32(hidden, down.weight)
    return (unpad_rows(product, len(x)) * weight.unsqueeze(1)).to(x.dtype)
