"""RMS norm on NVIDIA GPUs.

A program takes a fixed tile of rows and the tile depends on the row's size alone, so every row is summed along one
tree. Multiplication and addition are never contracted into one rounding.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.tile import dense

TILE_ELEMENTS = 1024
NUM_WARPS = 4
MAX_BACKWARD_PROGRAMS = 1024


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Shape: x [..., C]; returns the result like x and rstd [num_rows] fp32."""
    x, weight = dense(x), dense(weight)
    rows, block = norm_tile(x.shape[-1])
    num_rows = x.numel() // x.shape[-1]
    out, rstd = torch.empty_like(x), x.new_empty(num_rows, dtype=torch.float32)
    _forward[(triton.cdiv(num_rows, rows),)](
        x, weight, out, rstd, num_rows, eps, x.shape[-1], rows, block, num_warps=NUM_WARPS, enable_fp_fusion=False
    )
    return out, rstd


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    grad, x, weight = dense(grad), dense(x), dense(weight)
    rows, block = norm_tile(x.shape[-1])
    rows *= 4 if rows > 1 else 1
    num_tiles = triton.cdiv(len(rstd), rows)
    programs = min(num_tiles, MAX_BACKWARD_PROGRAMS)
    grad_x = torch.empty_like(x)
    partial = x.new_empty(programs, x.shape[-1], dtype=torch.float32)
    _backward[(programs,)](
        grad, x, weight, rstd, grad_x, partial, len(rstd), num_tiles, x.shape[-1], rows, block, num_warps=NUM_WARPS
    )
    return grad_x, partial.sum(0).to(weight.dtype)


def norm_tile(size: int) -> tuple[int, int]:
    """Rows of a program, and their padded length. Part of the contract: it fixes the tree of the sum."""
    block = triton.next_power_of_2(size)
    return max(1, TILE_ELEMENTS // block), block


@triton.jit(do_not_specialize=["num_rows"])
def _forward(x, weight, out, rstd, num_rows, eps, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    at = row[:, None] * SIZE + column[None, :]
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)
    normed = (wide * inverse[:, None]).to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + at, (normed * scale[None, :]).to(out.dtype.element_ty), mask=inside)
    tl.store(rstd + row, inverse, mask=row < num_rows)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _backward(
    grad, x, weight, rstd, grad_x, partial, num_rows, num_tiles,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    column = tl.arange(0, BLOCK)
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    grad_weight = tl.zeros((BLOCK,), tl.float32)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row < num_rows)[:, None] & (column < SIZE)[None, :]
        at = row[:, None] * SIZE + column[None, :]
        inverse = tl.load(rstd + row, mask=row < num_rows, other=0.0)[:, None]
        upper = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * inverse
        inner = upper * scale[None, :]
        mean = tl.sum(inner * normed, axis=1)[:, None] / SIZE
        tl.store(grad_x + at, (inverse * (inner - normed * mean)).to(grad_x.dtype.element_ty), mask=inside)
        grad_weight += tl.sum(upper * normed, axis=0)
    tl.store(partial + tl.program_id(0) * SIZE + column, grad_weight, mask=column < SIZE)
