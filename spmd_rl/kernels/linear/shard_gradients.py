"""What ranks of a trainer that share layers give each other, with its gradients.

Between layers each rank has some rows of all tokens (sequence parallelism). Before a layer, ranks
gather the rows, and after it they add their parts of the layer's output, each for its own rows. One
is the gradient of the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmd_rl.kernels.linear.shard_exchange import RowExchange, ShardExchange
from spmd_rl.kernels.runtime.differentiable import call


def all_rows(own: Tensor, exchange: RowExchange | None) -> Tensor:
    """Return the rows of all ranks, in their order; `own` without an exchange.

    Its gradient is the sum of the ranks' gradients, rounded once.
    Shape: own [T, N]; returns [P T, N]. Blocks: until all ranks are there, backward too.
    """
    if exchange is None:
        return own
    out: Tensor = call(_AllRows, own, exchange)
    return out


def own_rows_of_sum(part: Tensor, exchange: RowExchange, dtype: torch.dtype) -> Tensor:
    """Return this rank's rows of the sum over ranks, rounded once.

    Shape: part [P T, N] fp32; returns [T, N]. Blocks: as `all_rows`.
    """
    out: Tensor = call(_OwnRowsOfSum, part, exchange, dtype)
    return out


def gathered_columns(own: Tensor, first: int, exchange: ShardExchange) -> Tensor:
    """Return the columns of all ranks, of which this rank's begin at `first`.

    All ranks have the gradient of all columns. Shape: own [M, N]; returns [M, P N].
    """
    out: Tensor = call(_GatheredColumns, own, first, exchange)
    return out


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.rows(own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.sum_rows(grads[0].float(), None, grads[0].dtype), None


class _OwnRowsOfSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, exchange: RowExchange, dtype: torch.dtype) -> Tensor:
        ctx.exchange = exchange
        return exchange.sum_rows(part, None, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.rows(grads[0]).float(), None, None


class _GatheredColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, first: int, exchange: ShardExchange) -> Tensor:
        ctx.columns = slice(first, first + own.shape[1])
        return exchange.gather_columns(own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][:, ctx.columns], None, None
