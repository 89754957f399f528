"""A planted kind of layer: routed experts, and one that every token takes. Its module is beside it.

It computes every expert for every token, and weighs those that the router did not choose by zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from spmd_rl.model.layers.layer import LayerCost, PointDef, TensorSpec, num_elements
from spmd_rl.model.layers.mlp import Mlp, gated_cost, gated_parameters
from spmd_rl.model.layers.mlp_module import GatedMlp
from spmd_rl.model.linear import Linear


@dataclass(frozen=True)
class SharedMoe:
    hidden_size: int
    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int
    name: str = "mlp"

    def parameters(self) -> Sequence[TensorSpec]:
        router = TensorSpec(f"{self.name}.gate.weight", (self.num_experts, self.hidden_size))
        experts = [
            one
            for number in range(self.num_experts)
            for one in gated_parameters(
                f"{self.name}.experts.{number}", self.hidden_size, self.expert_size, False, number
            )
        ]
        shared = f"{self.name}.shared_expert"
        return [
            router,
            *experts,
            *gated_parameters(shared, self.hidden_size, self.shared_size, False),
        ]

    def cost(self, tp: int = 1) -> LayerCost:
        inner = self.experts_per_token * self.expert_size + self.shared_size
        cost = gated_cost(self.hidden_size, inner)
        router = self.hidden_size * self.num_experts
        return replace(
            cost,
            parameters=num_elements(self.parameters()),
            multiplied=cost.multiplied + router,
        )

    def cache(self, tp: int = 1) -> None:
        return None

    def points(self) -> Sequence[PointDef]:
        return [
            PointDef(
                "router",
                "router",
                (self.num_experts,),
                ("post_norm",),
                output_of=f"{self.name}.gate",
                is_product=True,
            ),
            PointDef(
                "experts",
                "sum of the experts",
                (self.hidden_size,),
                ("post_norm", "router"),
                output_of=self.name,
                is_added=True,
            ),
        ]

    def module(self, number: int) -> nn.Module:
        return SharedMoeModule(self)


class SharedMoeModule(nn.Module):
    def __init__(self, spec: SharedMoe) -> None:
        super().__init__()
        self.experts_per_token = spec.experts_per_token
        self.gate = Linear(spec.hidden_size, spec.num_experts, bias=False)
        self.experts = nn.ModuleList(
            Mlp(spec.hidden_size, spec.expert_size).module(0) for _ in range(spec.num_experts)
        )
        self.shared_expert = GatedMlp(spec.hidden_size, spec.shared_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).float().softmax(-1)
        least = chosen.topk(self.experts_per_token, -1).values[:, -1:]
        weights = torch.where(chosen >= least, chosen, 0.0)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        out = self.shared_expert(x)
        for number, expert in enumerate(self.experts):
            out = out + weights[:, number : number + 1] * expert(x)
        return out
