"""A planted kind of layer with states: the Mamba2 mixer of Nemotron-H, in its slow form.

Its module is beside it. Source: Dao and Gu, Transformers are SSMs (2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from spmd_rl.model.layers.layer import (
    CacheSpec,
    LayerCost,
    PointDef,
    StateSpec,
    TensorSpec,
    num_elements,
    product,
)


@dataclass(frozen=True)
class Mamba2:
    """`num_heads` states, each [head_dim, state_size]; heads of a group share what writes and reads
    them.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_size: int
    rms_eps: float
    least_step: float = 0.001
    name: str = "mixer"

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_width(self) -> int:
        return self.width + 2 * self.num_groups * self.state_size

    def parameters(self) -> Sequence[TensorSpec]:
        own, heads, rows = self.name, (self.num_heads,), self.width + self.conv_width
        return [
            TensorSpec(f"{own}.dt_bias", heads),
            TensorSpec(f"{own}.A_log", heads),
            TensorSpec(f"{own}.D", heads),
            TensorSpec(f"{own}.conv1d.weight", (self.conv_width, 1, self.conv_size)),
            TensorSpec(f"{own}.conv1d.bias", (self.conv_width,)),
            TensorSpec(f"{own}.in_proj.weight", (rows + self.num_heads, self.hidden_size)),
            TensorSpec(f"{own}.norm.weight", (self.width,)),
            TensorSpec(f"{own}.out_proj.weight", (self.hidden_size, self.width)),
        ]

    def cost(self, tp: int = 1) -> LayerCost:
        weights = num_elements(self.parameters())
        kept = 4 * (self.width + self.conv_width)
        return LayerCost(weights, weights, kept_products=kept, gradients=kept, workspace=kept)

    def cache(self, tp: int = 1) -> CacheSpec:
        rows = StateSpec((self.conv_size - 1, self.conv_width), is_wide=False)
        heads = StateSpec((self.num_heads, self.head_dim, self.state_size), is_wide=True)
        return CacheSpec(states=(rows, heads))

    def part(self, tp: int) -> Mamba2:
        return self

    def points(self) -> Sequence[PointDef]:
        rows = self.width + self.conv_width + self.num_heads
        return [
            product(self.name, "in_proj", "projection to all", (rows,), "input_norm"),
            PointDef(
                "scan", "state space, normed", (self.width,), ("in_proj",), output_of="mixer.norm"
            ),
            product(self.name, "out_proj", "output", (self.hidden_size,), "scan", is_added=True),
        ]

    def module(self, number: int) -> nn.Module:
        from tests.planted.mamba_module import MambaMixer

        return MambaMixer(self, number)
