"""Digits of squares, for Triton's interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.kernels.rowwise.square_digits_triton import add_square_digits


def digits(x: Tensor, shift: int, bits: int) -> Tensor:
    """Return the sums that `add_square_digits` adds to others. Shape: [3] fp64."""
    sums = torch.ones(3, dtype=torch.float64)
    add_square_digits(sums, x, shift, bits)
    return sums - 1
