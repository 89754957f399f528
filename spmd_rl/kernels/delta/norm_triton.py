"""Gated norm of what a gated delta layer gives, on NVIDIA GPUs: forward and backward."""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.runtime.padding import dense

ROWS = 8  # of a tile
STEPS = 16  # tiles of a program of the backward kernel


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return norm(x) * weight * silu(gate), rounded once, to gate's dtype.

    Shape: x fp32 and gate [..., D], weight [D].
    """
    x, gate = dense(x), dense(gate)
    out, dim = torch.empty_like(gate), x.shape[-1]
    num_rows = x.numel() // dim
    _gated_norm[(triton.cdiv(num_rows, ROWS),)](
        x, gate, dense(weight), out, num_rows, eps, dim, ROWS, triton.next_power_of_2(dim),
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm(
    x, gate, weight, out, num_rows, eps, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < DIM)[None, :]
    at = row[:, None] * DIM + column[None, :]
    wide = tl.load(x + at, mask=inside, other=0.0)
    z = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=1) / DIM + eps)[:, None]
    result = normed * scale[None, :] * (z / (1.0 + tl.exp(-z)))
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


def gated_norm_gradients(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `x`, `gate` and `weight`. Shape: grad [..., D]."""
    x, gate, grad = dense(x), dense(gate), dense(grad)
    of_x, of_gate, dim = torch.empty_like(x), torch.empty_like(gate), x.shape[-1]
    num_rows = x.numel() // dim
    num_programs = triton.cdiv(num_rows, ROWS * STEPS)
    partial = x.new_empty(num_programs, dim)
    _gated_norm_backward[(num_programs,)](
        x, gate, dense(weight), grad, of_x, of_gate, partial, num_rows, eps, dim, ROWS, STEPS,
        triton.next_power_of_2(dim), num_warps=4,
    )  # fmt: skip
    return of_x, of_gate, partial.sum(0).to(weight.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm_backward(
    x, gate, weight, grad, of_x, of_gate, of_weight, num_rows, eps, DIM: tl.constexpr,
    ROWS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    column = tl.arange(0, BLOCK)
    is_column = column < DIM
    scale = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(STEPS):
        row = (tl.program_id(0).to(tl.int64) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        inside = (row < num_rows)[:, None] & is_column[None, :]
        at = row[:, None] * DIM + column[None, :]
        wide = tl.load(x + at, mask=inside, other=0.0)
        z = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        of_out = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        norm = tl.rsqrt(tl.sum(wide * wide, axis=1) / DIM + eps)[:, None]
        open_part = 1.0 / (1.0 + tl.exp(-z))
        normed, passed = wide * norm, z * open_part
        total += tl.sum(of_out * normed * passed, axis=0)
        of_passed = of_out * normed * scale[None, :]
        of_z = of_passed * open_part * (1.0 + z * (1.0 - open_part))
        of_normed = of_out * scale[None, :] * passed
        along = tl.sum(of_normed * normed, axis=1)[:, None] / DIM
        tl.store(of_x + at, (of_normed - normed * along) * norm, mask=inside)
        tl.store(of_gate + at, of_z.to(of_gate.dtype.element_ty), mask=inside)
    tl.store(of_weight + tl.program_id(0) * DIM + column, total, mask=is_column)
