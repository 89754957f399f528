"""Torch module of a gated MLP."""

from __future__ import annotations

from torch import Tensor

from spmd_rl.model.fused_projections import FusableLayer, project_gated
from spmd_rl.model.linear import Linear


class GatedMlp(FusableLayer):
    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def fusable(self) -> list[Linear]:
        return [self.gate_proj, self.up_proj]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(project_gated(x, self.joined, self.gate_proj, self.up_proj))
