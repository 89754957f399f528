"""SiLU(gate) * up on NVIDIA GPUs: elementwise in fp32, one rounding."""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.runtime.pdl import overlapping, wait

BLOCK = 1024


def silu_mul_forward(gate: Tensor, up: Tensor) -> Tensor:
    """Shape: gate and up [T, F], with any stride between rows."""
    gate, up = _rows(gate), _rows(up)
    out = gate.new_empty(gate.shape)
    num_rows, columns = gate.shape
    _forward[(num_rows, triton.cdiv(columns, BLOCK))](
        gate,
        up,
        out,
        gate.stride(0),
        up.stride(0),
        columns,
        BLOCK,
        enable_fp_fusion=False,
        **overlapping(),
    )
    return out


def silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, contiguous."""
    grad, gate, up = grad.contiguous(), _rows(gate), _rows(up)
    grad_gate, grad_up = torch.empty_like(grad), torch.empty_like(grad)
    num_rows, columns = gate.shape
    _backward[(num_rows, triton.cdiv(columns, BLOCK))](
        grad, gate, up, grad_gate, grad_up, gate.stride(0), up.stride(0), columns, BLOCK
    )
    return grad_gate, grad_up


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


@triton.jit
def _forward(gate, up, out, gate_stride, up_stride, columns, BLOCK: tl.constexpr) -> None:
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait()
    g = tl.load(gate + row * gate_stride + column, mask=column < columns, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(
        out + row * columns + column,
        silu_times(g, u).to(out.dtype.element_ty),
        mask=column < columns,
    )


@triton.jit
def silu_times(gate, up) -> tl.tensor:
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _backward(
    grad, gate, up, grad_gate, grad_up, gate_stride, up_stride, columns, BLOCK: tl.constexpr
) -> None:
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = column < columns, row * columns + column
    upper = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    slope = sigmoid * (1.0 + g * (1.0 - sigmoid))
    tl.store(grad_gate + at, (upper * u * slope).to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + at, (upper * g * sigmoid).to(grad_up.dtype.element_ty), mask=inside)
