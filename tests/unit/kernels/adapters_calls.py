"""Calls of the kernel of adapters, for Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from spmd_rl.kernels.linear.adapters_triton import add_low_rank


def added(
    product: Tensor, low: Tensor, up: Tensor, scale: float, widths: Sequence[int], first: int
) -> Tensor:
    """Return the columns from `first` on, which change, of a product that is wider."""
    add_low_rank(product[:, first:], low, up, scale, widths)
    return product
