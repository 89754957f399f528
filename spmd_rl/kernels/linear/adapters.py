"""Low-rank adapters: what they add to the products of linear layers (LoRA)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spmd_rl.kernels.linear.linear import is_exact, linear
from spmd_rl.kernels.runtime.padding import dense


def add_adapters(
    product: Tensor, x: Tensor, down: Tensor, up: Tensor, scale: float, widths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Add to each part of `product` what an adapter of its own makes of x: B (scale * A x).

    All roundings are to x's dtype: of A x, of it scaled, of its product with B, and of the sum. So
    the bits do not depend on which layers share a product, nor on whether one kernel does the rest.
    No gradient is kept, and `product` may change in place. Returns the sum, and A x of all parts.
    Shape: product [T, N], x [T, K], down [P R, K], up [N, R]; `widths` are the P parts' columns.
    """
    if is_exact(x):
        from spmd_rl.kernels.linear.adapters_triton import add_low_rank

        low = linear(x, down)
        add_low_rank(product, low, dense(up), scale, widths)
        return product, low
    lows = [linear(x, one) for one in down.split(up.shape[1])]
    added = [
        linear(low * scale, one) for low, one in zip(lows, up.split(list(widths)), strict=True)
    ]
    return product + torch.cat(added, 1), torch.cat(lows, 1)
