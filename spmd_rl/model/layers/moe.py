"""Mixture of experts: a router, and gated MLPs of which each token takes some."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from spmd_rl.model.layers.layer import (
    LayerCost,
    PointDef,
    TensorSpec,
    num_elements,
    weights_of,
)
from spmd_rl.model.layers.mlp import PROJECTIONS, gated_cost, gated_parameters
from spmd_rl.model.layers.sigmoid_router import CORRECTION, SigmoidRouter

if TYPE_CHECKING:
    from torch import nn

# rename it when bits change; moe_module.py says where they are rounded
MOE_RULE = "slots-fp32-v1"
ROUTES = "routes"  # the point of a token's experts, and of their weights after these
# SGLang's parameters of all experts of a layer, and what each expert's rows are, in order
STACKED = {"w13_weight": PROJECTIONS[:2], "w2_weight": PROJECTIONS[2:]}
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class Moe:
    """`num_experts` gated MLPs with `expert_size` hidden units each.

    With `normalizes_weights`, the weights of a token's experts add up to one, before `sigmoid`
    scales them; it is None where a softmax is the choice. Every token takes `shared_size` hidden
    units besides, times the sigmoid of a gate if there is a `shared_gate`. With `biases`, all
    products have one, the router's too. `limit` is that of `mlp_module.GatedMlp`, 0 for none.
    """

    hidden_size: int
    num_experts: int
    experts_per_token: int
    expert_size: int
    normalizes_weights: bool = True
    shared_size: int = 0
    sigmoid: SigmoidRouter | None = None
    shared_gate: bool = False
    biases: bool = False
    limit: float = 0.0
    name: str = "mlp"

    def parameters(self) -> Sequence[TensorSpec]:
        gate, hidden = f"{self.name}.gate", self.hidden_size
        found = weights_of(gate, self.num_experts, hidden, self.biases, stays_full=True)
        if self.sigmoid:
            found.append(TensorSpec(f"{gate}.{CORRECTION}", (self.num_experts,), is_fixed=True))
        for number in range(self.num_experts):
            found += self.expert_parameters(number)
        return found + self._shared_parameters()

    def _shared_parameters(self) -> list[TensorSpec]:
        """Return the parameters that every token takes."""
        if not self.shared_size:
            return []
        hidden, shared = self.hidden_size, f"{self.name}.shared_expert"
        if not self.shared_gate:
            return gated_parameters(f"{shared}s", hidden, self.shared_size, False)
        gate = TensorSpec(f"{shared}_gate.weight", (1, hidden), stays_full=True)
        return [*gated_parameters(shared, hidden, self.shared_size, False), gate]

    def expert_parameters(self, number: int) -> list[TensorSpec]:
        """Return the parameters of expert `number`."""
        name = f"{self.name}.experts.{number}"
        return gated_parameters(
            name, self.hidden_size, self.expert_size, self.biases, expert=number
        )

    def cost(self, tp: int = 1) -> LayerCost:
        """Return the cost where all experts have equally many tokens."""
        inner = -(-(self.experts_per_token * self.expert_size + self.shared_size) // tp)
        cost = gated_cost(self.hidden_size, inner)
        copies = self.experts_per_token * self.hidden_size
        idle = (self.num_experts - self.experts_per_token) * num_elements(self.expert_parameters(0))
        return replace(
            cost,
            parameters=num_elements(self.parameters()),
            idle=idle,
            multiplied=cost.multiplied + self.hidden_size * (self.num_experts + self.shared_gate),
            routed=2 * copies,
        )

    def cache(self, tp: int = 1) -> None:
        return None

    def part(self, tp: int) -> Moe:
        """Return the mixture with a part of what every token takes; experts are whole."""
        return replace(self, shared_size=self.shared_size // tp)

    def points(self) -> Sequence[PointDef]:
        hidden = (self.hidden_size,)
        return [
            PointDef(
                "router",
                "logits of the router",
                (self.num_experts,),
                ("post_norm",),
                output_of=f"{self.name}.scores",
            ),
            PointDef(
                ROUTES,
                "choice of experts",
                (2 * self.experts_per_token,),
                ("router",),
                output_of=f"{self.name}.chosen",
            ),
            PointDef(
                "experts",
                "sum of what a token's experts give it",
                hidden,
                ("post_norm", ROUTES),
                output_of=self.name,
                is_added=True,
            ),
        ]

    def module(self, number: int) -> nn.Module:
        from spmd_rl.model.layers.moe_module import MoeMlp

        sizes = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "name"}
        return MoeMlp(**sizes)


def is_of_expert(name: str) -> bool:
    """Whether a parameter is that of one of several experts."""
    return _EXPERT.search(name) is not None
