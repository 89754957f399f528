"""Gated MLP: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spmd_rl.model.layers.layer import (
    Cut,
    LayerCost,
    PointDef,
    TensorSpec,
    num_elements,
    product,
    weights_of,
)

if TYPE_CHECKING:
    from torch import nn

GATE_UP = "gate_up_proj"  # the product of the two projections as one
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
FUSED = {GATE_UP: PROJECTIONS[:2]}


@dataclass(frozen=True)
class Mlp:
    """A gated MLP with `intermediate_size` hidden units."""

    hidden_size: int
    intermediate_size: int
    bias: bool = False
    name: str = "mlp"

    def parameters(self) -> Sequence[TensorSpec]:
        return gated_parameters(self.name, self.hidden_size, self.intermediate_size, self.bias)

    def cost(self, tp: int = 1) -> LayerCost:
        cost = gated_cost(self.hidden_size, -(-self.intermediate_size // tp))
        return replace(cost, parameters=num_elements(self.parameters()))

    def cache(self, tp: int = 1) -> None:
        return None

    def part(self, tp: int) -> Mlp:
        return replace(self, intermediate_size=self.intermediate_size // tp)

    def points(self) -> Sequence[PointDef]:
        inner = (self.intermediate_size,)
        projections = [
            product(
                self.name, f"{one}_proj", f"{one} projection", inner, "post_norm", fused=GATE_UP
            )
            for one in ("gate", "up")
        ]
        return [
            *projections,
            PointDef(
                "act",
                "SiLU(gate) * up",
                inner,
                ("gate_proj", "up_proj"),
                source="post_norm",
                input_of=f"{self.name}.down_proj",
            ),
            product(
                self.name,
                "down_proj",
                "down projection",
                (self.hidden_size,),
                "act",
                is_added=True,
            ),
        ]

    def module(self, number: int) -> nn.Module:
        from spmd_rl.model.layers.mlp_module import GatedMlp

        return GatedMlp(self.hidden_size, self.intermediate_size, self.bias)


def gated_cost(hidden_size: int, inner: int) -> LayerCost:
    """Return what a token costs in gated MLPs with `inner` hidden units in all."""
    return LayerCost(
        multiplied=3 * hidden_size * inner,
        kept_products=2 * inner,  # gate and up
        kept_cheap=inner,  # their product
        gradients=3 * inner,
        workspace=3 * inner,
    )


def gated_parameters(
    name: str, hidden_size: int, inner: int, bias: bool, expert: int | None = None
) -> list[TensorSpec]:
    """Return the parameters of a gated MLP whose module is `name`."""
    unit = f"hidden units of the {'expert' if expert is not None else 'MLP'}"
    rows, columns = Cut(0, inner, unit), Cut(1, inner, unit)
    gate, up, down = (f"{name}.{projection}" for projection in PROJECTIONS)
    return [
        *weights_of(gate, inner, hidden_size, bias, cut=rows, expert=expert),
        *weights_of(up, inner, hidden_size, bias, cut=rows, expert=expert),
        *weights_of(
            down, hidden_size, inner, bias, cut=columns, expert=expert, writes_residual=True
        ),
    ]
