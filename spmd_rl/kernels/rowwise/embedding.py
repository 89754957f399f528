"""Embedding: each token's row of a table, copied. There is no arithmetic, so a row's bits are the
table's.

On GPUs torch's kernel is launched plainly: those after it may read early what was made before it
(`overlap_triton`).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def embed(ids: Tensor, weight: Tensor) -> Tensor:
    """Row `ids` of the weight, differentiable in the weight.

    Shape: ids [...] int64, weight [V, C]; returns [..., C]. Raises: IndexError, on the CPU, for an
    id outside [0, V).
    """
    return F.embedding(ids, weight)
