"""A weight in 8 bits: e4m3 codes, and a scale for each block of 128 x 128."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128  # rows and columns of a block
CODE = torch.float8_e4m3fn


class BlockCodes(NamedTuple):
    """A weight in 8 bits; scales are powers of two.

    Shape: codes [N, K] e4m3, scales [ceil(N/128), ceil(K/128)] fp32.
    """

    codes: Tensor
    scales: Tensor


Weight = Tensor | BlockCodes


def num_blocks(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return how many blocks a weight of this shape has in each dim."""
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)
