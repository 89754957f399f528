"""Padding to the row tile: every contract op on the CPU sees its rows in multiples of 16.

For a handful of rows, BLAS libraries take another code path with another order of sums. From 8 rows
up, the bits of a row were measured not to depend on the number of rows. Padding to 16 keeps all
calls there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_TILE = 16
# K is padded to a multiple of 4: a remainder would be summed differently by a row's place in its
# tile.
COLUMN_UNIT = 4


def padded_rows(num_rows: int) -> int:
    """Return the least multiple of the row tile that holds `num_rows`, at least one tile."""
    return max(1, -(-num_rows // ROW_TILE)) * ROW_TILE


def pad_rows(x: Tensor) -> Tensor:
    """Append zero rows to `x` [T, ...] up to a multiple of the tile; `x` itself if it is one."""
    missing = padded_rows(x.shape[0]) - x.shape[0]
    if missing == 0:
        return x
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def pad_columns(x: Tensor) -> Tensor:
    """Append zero columns to `x` [..., C] up to a multiple of the unit; `x` itself if it is one."""
    missing = -x.shape[-1] % COLUMN_UNIT
    return F.pad(x, (0, missing)) if missing else x


def unpad_rows(x: Tensor, num_rows: int) -> Tensor:
    """Return the first rows of `x`.

    If that is all, return `x` itself: the gradient of even a full slice is a copy.
    """
    return x if x.shape[0] == num_rows else x[:num_rows]


def dense(x: Tensor) -> Tensor:
    """Return `x` contiguous and 16-byte aligned.

    GPU compilers choose a kernel's layout by alignment, and so the order of its sums.
    """
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def row_stride(x: Tensor) -> int:
    """Return how many elements lie between the first ones of two rows of `x` [T, C]."""
    return x.shape[1] if x.is_contiguous() else x.stride(0)


def has_dense_rows(x: Tensor) -> bool:
    """Return whether each row of `x` [T, C] is contiguous and 16-byte aligned.

    Columns of a wider matrix may be of this kind.
    """
    apart = row_stride(x)
    aligned = x.data_ptr() % 16 == 0 and apart * x.element_size() % 16 == 0
    return aligned and x.stride(1) == 1 and apart >= x.shape[1]


def dense_rows(x: Tensor) -> Tensor:
    """Return `x` [T, C] itself if it has dense rows, else `dense`."""
    return x if has_dense_rows(x) else dense(x)


def dense_heads(x: Tensor) -> Tensor:
    """Return `x` [T, H, D] itself if its heads lie side by side in aligned rows, else `dense`.

    A slice of a joint projection is of this kind.
    """
    num_heads, dim = x.shape[1:]
    side_by_side = x.stride(2) == 1 and (x.stride(1) == dim or num_heads == 1)
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0 and dim % 16 == 0
    return x if side_by_side and aligned else dense(x)
