"""Rotary positions: one fp32 table of cosines and sines, made on the host, used by trainer and engine alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rope_table(inv_freq: Tensor, num_positions: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin of position x frequency.

    Shape: inv_freq [D/2] fp32; returns two tensors [num_positions, D/2] fp32.
    """
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inv_freq.float())
    return angles.cos() * scale, angles.sin() * scale


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of the last dimension, in fp32, with one rounding at the end.

    Shape: x [T, H, D], cos and sin [T, D/2] (the table's rows for each token).
    Source: Su et al., RoFormer (2021), in the half-split layout of Hugging Face models.
    """
    return _Rope.apply(x, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    if x.is_cuda:
        from spmd_rl.kernels.rope_triton import rotate

        return rotate(x, cos, sin, direction)
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if direction < 0:
        sin = -sin
    out = torch.empty(x.shape, dtype=torch.float32)
    turned_first, turned_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=turned_first).sub_(second * sin)
    torch.mul(second, cos, out=turned_second).add_(first * sin)
    return out.to(x.dtype)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, sin, -1), None, None
