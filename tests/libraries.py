"""Products that tests put in the place of torch's. Whether the library of a CPU makes such sums
depends on the CPU.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from spmd_rl.kernels.runtime.padding import ROW_TILE

plain = F.linear


def other_sums_of_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """K is summed in another order for fewer rows than a tile has."""
    return plain(x.flip(1), weight.flip(1), bias) if len(x) < ROW_TILE else plain(x, weight, bias)


def other_sums_of_few_columns(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """K is summed in another order for a weight of fewer rows than a tile has."""
    narrow = len(weight) < ROW_TILE
    return plain(x.flip(1), weight.flip(1), bias) if narrow else plain(x, weight, bias)
