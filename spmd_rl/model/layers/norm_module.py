"""Root-mean-square norm, with the residual add before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spmd_rl.kernels import add_rms_norm, rms_norm


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (normed, summed), where x is first added to the residual, if there is one."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps)
