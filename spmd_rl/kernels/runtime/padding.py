"""The row tile: every contract op on the CPU sees its rows in multiples of 16.

BLAS libraries take another code path, with another order of sums, for a handful of rows. From 8
rows up the bits of a row were measured not to depend on how many rows there are; padding to 16
keeps all calls there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_TILE = 16
# K is taken in fours; in products of few columns a row's place in its tile decides on what is left
COLUMN_UNIT = 4


def padded_rows(num_rows: int) -> int:
    """The least multiple of the row tile that holds `num_rows`, and at least one tile."""
    return max(1, -(-num_rows // ROW_TILE)) * ROW_TILE


def pad_rows(x: Tensor) -> Tensor:
    """`x` [T, ...] with zero rows appended up to a multiple of the tile; `x` itself where none are
    missing.
    """
    missing = padded_rows(x.shape[0]) - x.shape[0]
    if missing == 0:
        return x
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def pad_columns(x: Tensor) -> Tensor:
    """`x` [..., C] with zero columns appended up to a multiple of the unit; `x` itself where none
    are missing.
    """
    missing = -x.shape[-1] % COLUMN_UNIT
    return F.pad(x, (0, missing)) if missing else x


def unpad_rows(x: Tensor, num_rows: int) -> Tensor:
    """The first rows of `x`; `x` itself if that is all, because the gradient of even a whole slice
    is a copy.
    """
    return x if x.shape[0] == num_rows else x[:num_rows]


def dense(x: Tensor) -> Tensor:
    """`x` contiguous and 16-byte aligned: GPU compilers choose a kernel's layout, and so its sums,
    by alignment.
    """
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def dense_heads(x: Tensor) -> Tensor:
    """`x` [T, H, D] as it is where its heads lie side by side in 16-byte aligned rows, as in a part
    of a joint projection; else `dense`."""
    num_heads, dim = x.shape[1:]
    side_by_side = x.stride(2) == 1 and (x.stride(1) == dim or num_heads == 1)
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0 and dim % 16 == 0
    return x if side_by_side and aligned else dense(x)
