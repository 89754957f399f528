"""Embedding: a copy of each token's row of a table, without arithmetic.

On GPUs torch's kernel is launched plainly, so later kernels may read early what existed before it
(`pdl`).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from spmd_rl.kernels.linear.shard_exchange import RowExchange
from spmd_rl.kernels.linear.shard_gradients import own_rows_of_sum


def embed(ids: Tensor, weight: Tensor) -> Tensor:
    """Return rows `ids` of the weight, differentiable in the weight.

    Shape: ids [...] int64, weight [V, C]; returns [..., C]. Raises: IndexError, on the CPU, for an
    id outside [0, V).
    """
    return F.embedding(ids, weight)


def embed_shared(ids: Tensor, weight: Tensor, first: int, exchange: RowExchange) -> Tensor:
    """Return this rank's part of rows `ids` of a table, of which it has the rows from `first` on.

    The others are -0.0 here: a sum with it has every bit of a row.
    Shape: ids [P T] int64, weight [V', C]; returns [T, C]. Blocks: until all ranks have called.
    """
    others = (ids < first) | (ids >= first + len(weight))
    rows = embed((ids - first).masked_fill(others, 0), weight)
    own = rows.float().masked_fill(others.unsqueeze(1), -0.0)
    return own_rows_of_sum(own, exchange, weight.dtype)
