"""Linear layers whose weight is in few bits; they have the bits of the decoded one."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.kernels.linear.linear import is_exact, linear
from spmd_rl.kernels.low_precision.block_codes import BlockCodes, Weight


def coded_linear(x: Tensor, weight: BlockCodes, bias: Tensor | None = None) -> Tensor:
    """Return what `linear` does with the decoded weight, without a gradient.

    Shape: x [T, K], weight [N, K], bias [N]; returns [T, N].
    """
    if is_exact(x) and weight.format.has_kernels:
        from spmd_rl.kernels.low_precision.coded_dispatch import coded_matmul

        return coded_matmul(x, weight, bias)
    return linear(x, weight.decoded(x.dtype), bias)


def whole(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return what codes stand for, in `dtype`; a weight that is no codes stays as it is."""
    return weight.decoded(dtype) if isinstance(weight, BlockCodes) else weight
