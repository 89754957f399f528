"""Rotary positions on NVIDIA GPUs: elementwise, so the launch shape is free; only contraction must stay off."""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.tile import dense

MAX_HEADS = 16


def rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Shape: x [T, H, D], cos and sin [T, D/2]; `direction` -1 turns back."""
    x, cos, sin = dense(x), dense(cos), dense(sin)
    num_tokens, num_heads, dim = x.shape
    heads = min(triton.next_power_of_2(num_heads), MAX_HEADS)
    out = torch.empty_like(x)
    _rotate[(num_tokens, triton.cdiv(num_heads, heads))](
        x, cos, sin, out, num_heads,
        dim // 2, heads, triton.next_power_of_2(dim // 2), direction, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def _rotate(
    x, cos, sin, out, num_heads,
    HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, DIRECTION: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)
    inside = (head < num_heads)[:, None] & (column < HALF)[None, :]
    at = (token * num_heads + head)[:, None] * (2 * HALF) + column[None, :]
    c = tl.load(cos + token * HALF + column, mask=column < HALF, other=0.0)[None, :]
    s = tl.load(sin + token * HALF + column, mask=column < HALF, other=0.0)[None, :] * DIRECTION
    first = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + at + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out + at + HALF, (second * c + first * s).to(out.dtype.element_ty), mask=inside)
