"""First half of a gated MLP: SiLU of the gate projection times the up projection."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.kernels.linear.linear import is_exact, linear
from spmd_rl.kernels.linear.tiles import choose_gated_tile
from spmd_rl.kernels.rowwise.activation import silu_mul


def silu_mul_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return `silu_mul` of the halves of x @ weight.T.

    One kernel does it all, with the same bits, where that is faster: for few rows.
    Shape: x [T, K], weight [2 F, K], the gate's rows first; returns [T, F].
    """
    if not is_one_kernel(x, weight):
        return silu_mul(*linear(x, weight).chunk(2, dim=-1))
    from spmd_rl.kernels.linear.dispatch import own_matmul_into

    out = x.new_empty(x.shape[0], len(weight) // 2)
    own_matmul_into(out, x, weight, None, gated=True)
    return out


def is_one_kernel(x: Tensor, weight: Tensor) -> bool:
    """Return whether `silu_mul_linear` is a single kernel for these operands."""
    if torch.is_grad_enabled() or not is_exact(x):
        return False
    return choose_gated_tile(x.shape[0], len(weight) // 2) is not None
