"""SiLU(gate) * up on NVIDIA GPUs: elementwise in fp32, one rounding."""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.tile import dense

BLOCK = 1024


def silu_mul_forward(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = dense(gate), dense(up)
    out = torch.empty_like(gate)
    _forward[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, out, gate.numel(), BLOCK, enable_fp_fusion=False)
    return out


def silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    grad, gate, up = dense(grad), dense(gate), dense(up)
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    _backward[(triton.cdiv(gate.numel(), BLOCK),)](grad, gate, up, grad_gate, grad_up, gate.numel(), BLOCK)
    return grad_gate, grad_up


@triton.jit
def _forward(gate, up, out, count, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < count, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out + at, (g / (1.0 + tl.exp(-g)) * u).to(out.dtype.element_ty), mask=at < count)


@triton.jit
def _backward(grad, gate, up, grad_gate, grad_up, count, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    upper = tl.load(grad + at, mask=at < count, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=at < count, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < count, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    slope = sigmoid * (1.0 + g * (1.0 - sigmoid))
    tl.store(grad_gate + at, (upper * u * slope).to(grad_gate.dtype.element_ty), mask=at < count)
    tl.store(grad_up + at, (upper * g * sigmoid).to(grad_up.dtype.element_ty), mask=at < count)
