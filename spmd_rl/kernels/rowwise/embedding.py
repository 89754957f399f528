"""Embedding: a copy of each token's row of a table, without arithmetic.

On GPUs torch's kernel is launched plainly, so later kernels may read early what existed before it
(`pdl`).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from spmd_rl.kernels.linear.shard_exchange import ShardExchange
from spmd_rl.kernels.linear.shard_gradients import summed


def embed(ids: Tensor, weight: Tensor) -> Tensor:
    """Return rows `ids` of the weight, differentiable in the weight.

    Shape: ids [...] int64, weight [V, C]; returns [..., C]. Raises: IndexError, on the CPU, for an
    id outside [0, V).
    """
    return F.embedding(ids, weight)


def embed_shared(ids: Tensor, weight: Tensor, first: int, exchange: ShardExchange) -> Tensor:
    """Return rows `ids` of a table of which this rank has the rows from `first` on.

    The others are -0.0 here: a sum with it has every bit of a row.
    Shape: ids [T] int64, weight [V', C]; returns [T, C]. Blocks: until all ranks have called.
    """
    others = (ids < first) | (ids >= first + len(weight))
    rows = embed((ids - first).masked_fill(others, 0), weight)
    own = rows.float().masked_fill(others.unsqueeze(1), -0.0)
    return summed(own, exchange, weight.dtype)
