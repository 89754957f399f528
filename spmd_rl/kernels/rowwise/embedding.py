"""Embedding: a copy of each token's row of a table, without arithmetic.

On GPUs torch's kernel is launched plainly, so later kernels may read early what existed before it
(`pdl`).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def embed(ids: Tensor, weight: Tensor) -> Tensor:
    """Return rows `ids` of the weight, differentiable in the weight.

    Shape: ids [...] int64, weight [V, C]; returns [..., C]. Raises: IndexError, on the CPU, for an
    id outside [0, V).
    """
    return F.embedding(ids, weight)
