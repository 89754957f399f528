"""RMS norm with Hugging Face's rounding points.

Statistics are in fp32, n = cast(x * rstd), y = cast(weight * n). A zero-centred weight is that of
Qwen3-Next: y = cast(x * rstd * (1 + weight)), all in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmd_rl.kernels.linear.later_sum import LaterSum
from spmd_rl.kernels.runtime.differentiable import call
from spmd_rl.kernels.runtime.recompute import recomputable


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centred: bool = False) -> Tensor:
    """Normalise the last dimension, along which alone statistics are taken.

    Shape: x [..., C], weight [C].
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
    """
    normed = call(_RmsNorm, x, weight, eps, zero_centred)
    recomputable([normed], lambda: [_RmsNorm.apply(x.detach(), weight, eps, zero_centred)])
    return normed


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centred: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (`rms_norm` of the rounded sum residual + x, that sum).

    Shape: x and residual [..., C], weight [C]. Raises: ValueError where the two differ in shape.
    """
    if x.shape != residual.shape:
        raise ValueError(f"a sum of {list(x.shape)} and {list(residual.shape)}")
    if isinstance(x, LaterSum):
        if not x.is_taken:
            return x.add_rms_norm(residual, weight, eps)
        x = x.taken()
    if x.is_cuda:
        normed, summed = call(_AddRmsNorm, x, residual, weight, eps, zero_centred)
        again = summed.detach(), weight, eps, zero_centred
        recomputable([normed], lambda: [_RmsNorm.apply(*again)])
        return normed, summed
    summed = residual + x
    return rms_norm(summed, weight, eps, zero_centred), summed


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centred: bool) -> Tensor:
        ctx.zero_centred = zero_centred
        if x.is_cuda:
            from spmd_rl.kernels.rowwise.norm_triton import rms_norm_forward

            out, rstd = rms_norm_forward(x, weight, eps, zero_centred)
            ctx.save_for_backward(x, weight, rstd)
            return out
        wide = x.float()
        rstd = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        if zero_centred:
            return (wide * rstd).mul_(1 + weight.float()).to(x.dtype)
        return (wide * rstd).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, rstd = ctx.saved_tensors
        if x.is_cuda:
            from spmd_rl.kernels.rowwise.norm_triton import rms_norm_backward

            found = rms_norm_backward(grads[0], x, weight, rstd, None, ctx.zero_centred)
            return *found, None, None
        grad = grads[0].float()
        normed = x.float() * rstd
        product = (grad * normed).flatten(0, -2)
        grad_weight = product.sum(0)
        factor = 1 + weight.float() if ctx.zero_centred else weight
        along = product.mv(factor.float() / len(weight)).view_as(rstd)
        grad_x = (grad * factor).sub_(normed.mul_(along)).mul_(rstd)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None, None


class _AddRmsNorm(torch.autograd.Function):
    """On NVIDIA GPUs, one kernel each way."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centred: bool
    ) -> tuple[Tensor, Tensor]:
        from spmd_rl.kernels.rowwise.norm_triton import add_rms_norm_forward

        out, summed, rstd = add_rms_norm_forward(x, residual, weight, eps, zero_centred)
        ctx.save_for_backward(summed, weight, rstd)
        ctx.zero_centred = zero_centred
        return out, summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        from spmd_rl.kernels.rowwise.norm_triton import rms_norm_backward

        summed, weight, rstd = ctx.saved_tensors
        grad, grad_weight = rms_norm_backward(
            grads[0], summed, weight, rstd, grads[1], ctx.zero_centred
        )
        return grad, grad, grad_weight, None, None
