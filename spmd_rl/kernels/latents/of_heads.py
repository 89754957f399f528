"""Products of which each head has a weight of its own: to latents, and from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmd_rl.kernels.linear.linear import linear
from spmd_rl.kernels.runtime.differentiable import call


def linear_of_heads(x: Tensor, weights: Tensor) -> Tensor:
    """Multiply each head with its weight. Shape: x [T, H, I], weights [H, O, I]; gives [T, H, O].

    A token's bits do not depend on others. On GPUs one kernel takes all heads.
    """
    if x.is_cuda:
        return call(_OfHeads, x, weights)
    pairs = zip(x.unbind(1), weights.unbind(0), strict=True)
    return torch.stack([linear(rows, weight.contiguous()) for rows, weight in pairs], 1)


class _OfHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor) -> Tensor:
        from spmd_rl.kernels.latents.of_heads_triton import products_of_heads

        ctx.save_for_backward(x, weights)
        return products_of_heads(x, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        from spmd_rl.kernels.latents.of_heads_triton import products_of_heads

        x, weights = ctx.saved_tensors
        by_head = grads[0].permute(1, 2, 0), x.transpose(0, 1)
        return products_of_heads(grads[0], weights.transpose(1, 2)), torch.bmm(*by_head)
