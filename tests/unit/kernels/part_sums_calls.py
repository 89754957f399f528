"""Sums of parts of K, for Triton's interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.kernels.linear.part_sums_triton import add_parts


def added(parts: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the sum of parts as `add_parts` sets it. Shape: parts [P, T, N]."""
    out = torch.full(parts.shape[1:], torch.nan, dtype=dtype)
    add_parts(parts, bias, out)
    return out
