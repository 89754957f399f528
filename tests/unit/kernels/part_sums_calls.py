"""Sums of parts of K, for Triton's interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.kernels.linear.part_sums_triton import add_parts
from spmd_rl.kernels.linear.tiles import Tile
from spmd_rl.kernels.linear.triton_gemm import matmul_into


def added(parts: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the sum of parts as `add_parts` sets it. Shape: parts [P, T, N]."""
    out = torch.full(parts.shape[1:], torch.nan, dtype=dtype)
    add_parts(parts, bias, out)
    return out


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, tile: tuple[int, ...], chains: int
) -> Tensor:
    """Return a product in several chains, in fp32. Shape: x [M, K], weight [N, K]."""
    out = torch.full((len(x), len(weight)), torch.nan)
    matmul_into(out, x, weight, bias, Tile(*tile), chains=chains)
    return out
