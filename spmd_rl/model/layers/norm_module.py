"""Root-mean-square norm, with the residual add before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spmd_rl.kernels import add_rms_norm, rms_norm


class RmsNorm(nn.Module):
    """A zero-centred weight is what is added to one (`rms_norm`)."""

    def __init__(self, size: int, eps: float, zero_centred: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - zero_centred))
        self.eps = eps
        self.zero_centred = zero_centred

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (normed, summed), where x is first added to the residual, if there is one."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps, self.zero_centred), x
        return add_rms_norm(x, residual, self.weight, self.eps, self.zero_centred)
