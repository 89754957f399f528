"""RMS norm on NVIDIA GPUs, alone or of a sum.

A program takes a fixed tile of rows and the tile depends on the row's size alone, so every row is
summed along one tree. Multiplication and addition are never contracted into one rounding.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.runtime.padding import dense
from spmd_rl.kernels.runtime.pdl import overlapping, wait

TILE_ELEMENTS = 1024
NUM_WARPS = 4
MAX_BACKWARD_PROGRAMS = 1024


def rms_norm_forward(
    x: Tensor, weight: Tensor, eps: float, zero_centred: bool = False
) -> tuple[Tensor, Tensor]:
    """Shape: x [..., C]; returns the result like x and rstd [num_rows] fp32."""
    x = dense(x)
    out, rstd = torch.empty_like(x), x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
    _launch_forward(x, None, weight, out, None, rstd, eps, zero_centred)
    return out, rstd


def add_rms_norm_forward(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centred: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Shape: x and residual [..., C]; returns the result and the sum like x, and rstd [num_rows]
    fp32.
    """
    x = dense(x)
    out, summed = torch.empty_like(x), torch.empty_like(x)
    rstd = x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
    _launch_forward(x, dense(residual), weight, out, summed, rstd, eps, zero_centred)
    return out, summed, rstd


def _launch_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    summed: Tensor | None,
    rstd: Tensor,
    eps: float,
    zero_centred: bool,
) -> None:
    rows, block = norm_tile(x.shape[-1])
    _forward[(triton.cdiv(len(rstd), rows),)](
        x, residual, dense(weight), out, summed, rstd, len(rstd), eps,
        x.shape[-1], rows, block, zero_centred,
        num_warps=NUM_WARPS, enable_fp_fusion=False, **overlapping(),
    )  # fmt: skip


def rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    grad_x: Tensor | None = None,
    zero_centred: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, plus `grad_x` if given, and of weight."""
    grad, x, weight = dense(grad), dense(x), dense(weight)
    rows, block = norm_tile(x.shape[-1])
    rows *= 4 if rows > 1 else 1
    num_tiles = triton.cdiv(len(rstd), rows)
    programs = min(num_tiles, MAX_BACKWARD_PROGRAMS)
    out = torch.empty_like(x)
    partial = x.new_empty(programs, x.shape[-1], dtype=torch.float32)
    _backward[(programs,)](
        grad, x, weight, rstd, None if grad_x is None else dense(grad_x), out, partial,
        len(rstd), num_tiles, x.shape[-1], rows, block, zero_centred, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out, partial.sum(0).to(weight.dtype)


def norm_tile(size: int) -> tuple[int, int]:
    """Return a program's rows, and their padded length, which fixes the tree of a row's sum."""
    block = triton.next_power_of_2(size)
    return max(1, TILE_ELEMENTS // block), block


@triton.jit(do_not_specialize=["num_rows"])
def _forward(
    x, residual, weight, out, summed, rstd, num_rows, eps, SIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ZERO_CENTRED: tl.constexpr = False,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    at = row[:, None] * SIZE + column[None, :]
    wait()
    given = tl.load(x + at, mask=inside, other=0.0)
    inverse = norm_of_tile(
        given, residual, weight, out, summed, at, inside, column, eps, SIZE, ZERO_CENTRED
    )
    tl.store(rstd + row, inverse, mask=row < num_rows)


@triton.jit
def norm_of_tile(
    given, residual, weight, out, summed, at, inside, column, eps, SIZE: tl.constexpr,
    ZERO_CENTRED: tl.constexpr = False,
) -> tl.tensor:  # fmt: skip
    """Norm a tile of x, which is first added to the residual if there is one; return the rstd.

    It writes `out`, and `summed` where it adds.
    """
    wide = given.to(tl.float32)
    if residual is not None:
        rounded = (tl.load(residual + at, mask=inside, other=0.0).to(tl.float32) + wide).to(
            given.dtype
        )
        tl.store(summed + at, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)
    normed = wide * inverse[:, None]
    if ZERO_CENTRED:
        scale = 1.0 + scale
    else:
        normed = normed.to(given.dtype).to(tl.float32)
    tl.store(out + at, (normed * scale[None, :]).to(out.dtype.element_ty), mask=inside)
    return inverse


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _backward(
    grad, x, weight, rstd, grad_x, out, partial, num_rows, num_tiles, SIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ZERO_CENTRED: tl.constexpr = False,
) -> None:  # fmt: skip
    column = tl.arange(0, BLOCK)
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    if ZERO_CENTRED:
        scale = 1.0 + scale
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
        result = inverse * (inner - normed * mean)
        if grad_x is not None:
            result += tl.load(grad_x + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
        grad_weight += tl.sum(upper * normed, axis=0)
    tl.store(partial + tl.program_id(0) * SIZE + column, grad_weight, mask=column < SIZE)
