"""Torch module of a gated MLP."""

from __future__ import annotations

from torch import Tensor

from spmd_rl.kernels.rowwise.activation import clamped_mul
from spmd_rl.model.fused_projections import FusableLayer, project, project_gated
from spmd_rl.model.linear import Linear


class GatedMlp(FusableLayer):
    """With a `limit`, what is multiplied is kept within it (`clamped_mul`)."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool, limit: float = 0.0
    ) -> None:
        super().__init__()
        self.limit = limit
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def fusable(self) -> list[Linear]:
        return [self.gate_proj, self.up_proj]

    def hidden(self, x: Tensor) -> Tensor:
        """Return what the down projection takes."""
        given = x, self.joined, self.gate_proj, self.up_proj
        if not self.limit:
            return project_gated(*given)
        gate, up = project(*given)
        return clamped_mul(gate, up, self.limit)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.hidden(x))
