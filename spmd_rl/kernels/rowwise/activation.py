"""SiLU(gate) * up and its kin, in fp32 with one rounding.

The sigmoid is spelled out. torch's CPU sigmoid and SiLU use another exponential for the last
elements of a buffer than for the rest (measured on torch 2.13), so their bits depend on a row's
position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmd_rl.kernels.runtime.differentiable import call
from spmd_rl.kernels.runtime.recompute import recomputable

SHARPNESS = 1.702  # of the sigmoid of `clamped_mul`


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Shape: gate and up [T, F], which may be halves of one tensor; returns [T, F], contiguous."""
    out = call(_SiluMul, gate, up)
    recomputable([out], lambda: [_SiluMul.apply(gate.detach(), up.detach())])
    return out


def clamped_mul(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Return (u + 1) * g * sigmoid(1.702 g), of a gate and of units that are kept within `limit`.

    A gate has no lower limit. Shape: as `silu_mul`. Source: OpenAI's gpt-oss (2025).
    """
    out = call(_ClampedMul, gate, up, limit)
    recomputable([out], lambda: [_ClampedMul.apply(gate.detach(), up.detach(), limit)])
    return out


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """Return x * sigmoid(gate), in fp32 with one rounding; on CPUs only.

    Shape: x [..., F], gate of the same shape, or [..., 1]; returns that of x.
    """
    return call(_SigmoidMul, x, gate)


class _ClampedMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.limit = limit
        g, u, denominator = _clamped(gate, up, limit)
        return (u * g).div_(denominator).to(gate.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (gate, up), limit = ctx.saved_tensors, ctx.limit
        g, u, denominator = _clamped(gate, up, limit)
        sigmoid = denominator.reciprocal_()
        grad = grads[0].float() * sigmoid
        of_up = grad * g * (up.abs() <= limit)
        of_gate = grad * u * torch.lerp(SHARPNESS * g, g.new_zeros(()), sigmoid).add_(1.0)
        return (of_gate * (gate <= limit)).to(gate.dtype), of_up.to(up.dtype), None


def _clamped(gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return gates, units plus one, and what the sigmoid divides by, all in fp32."""
    g, u = gate.float().clamp(max=limit), up.float().clamp(-limit, limit)
    return g, u.add_(1.0), (g * -SHARPNESS).exp_().add_(1.0)


class _SigmoidMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        sigmoid = gate.float().neg().exp_().add_(1.0).reciprocal_()
        ctx.save_for_backward(x, gate, sigmoid)
        return (x.float() * sigmoid).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, gate, sigmoid = ctx.saved_tensors
        grad_x = grads[0].float() * sigmoid
        slope = (grad_x * x).sum_to_size(gate.shape) * (1 - sigmoid)
        return grad_x.to(x.dtype), slope.to(gate.dtype)


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        if gate.is_cuda:
            from spmd_rl.kernels.rowwise.activation_triton import silu_mul_forward

            ctx.save_for_backward(gate, up)
            return silu_mul_forward(gate, up)
        wide = gate.float()
        denominator = wide.neg().exp_().add_(1.0)
        ctx.save_for_backward(gate, up, denominator)
        return (wide / denominator).mul_(up).to(gate.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        if grads[0].is_cuda:
            from spmd_rl.kernels.rowwise.activation_triton import silu_mul_backward

            return silu_mul_backward(grads[0], *ctx.saved_tensors)
        gate, up, denominator = ctx.saved_tensors
        sigmoid, grad = (
            denominator.reciprocal_(),
            grads[0].float(),
        )  # in place: it is used only here
        silu = sigmoid * gate
        slope = torch.lerp(silu, silu.new_ones(()), sigmoid)
        return slope.mul_(grad).mul_(up).to(gate.dtype), silu.mul_(grad).to(up.dtype)
