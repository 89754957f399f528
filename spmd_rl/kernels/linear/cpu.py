"""Linear layers on the CPU, in tiles of rows.

All tiles go into one call if this CPU was seen to give each of them the bits that it has alone.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.kernels.runtime.padding import ROW_TILE, pad_columns, pad_rows, unpad_rows

COMPARED_ROWS = (2 * ROW_TILE, 3 * ROW_TILE, 8 * ROW_TILE)
LARGE = 1024.0


def linear_on_cpu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `linear`. The first product of a shape also compares up to 128 rows, which takes time."""
    tall, weight = pad_columns(pad_rows(x)), pad_columns(weight)
    if rows_are_independent(*weight.shape, bias is not None, x.dtype, torch.get_num_threads()):
        out = F.linear(tall, weight, bias)
    else:
        out = torch.cat([F.linear(tile, weight, bias) for tile in tall.split(ROW_TILE)])
    return unpad_rows(out, x.shape[0])


@cache
@torch.no_grad()
def rows_are_independent(
    n: int, k: int, has_bias: bool, dtype: torch.dtype, num_threads: int
) -> bool:
    """Return whether a tile of rows has the same bits alone and among more; kept per process.

    Half of the columns hold large values whose products cancel. So another order of sums changes
    most elements, also of products that are rounded to bfloat16.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator) for shape in ((COMPARED_ROWS[-1], k), (n, k), (n,))
    )
    large = torch.randperm(k, generator=generator)[: k // 4 * 2]
    weight[:, large] = LARGE
    x[:, large[::2]], x[:, large[1::2]] = LARGE, -LARGE
    x, weight, bias = (part.to(dtype) for part in (x, weight, bias))
    layer = weight, bias if has_bias else None
    tiles = torch.cat([F.linear(tile, *layer) for tile in x.split(ROW_TILE)])
    return all(torch.equal(F.linear(x[:count], *layer), tiles[:count]) for count in COMPARED_ROWS)
