"""Gradients of what ranks that share layers give each other in a forward pass.

A loss is computed by all ranks alike, so each has the gradient of what all have. The input of
column-parallel products is used by each rank for its own columns: its gradient is a sum over ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmd_rl.kernels.linear.shard_exchange import ShardExchange
from spmd_rl.kernels.runtime.differentiable import call


def shared_input(x: Tensor, exchange: ShardExchange | None) -> Tensor:
    """Return x, of which ranks compute different things. Its gradient is the sum of theirs.

    Blocks: in the backward pass, until all ranks are there.
    """
    if exchange is None or not torch.is_grad_enabled():
        return x
    out: Tensor = _SharedInput.apply(x, exchange)
    return out


def summed(part: Tensor, exchange: ShardExchange, dtype: torch.dtype) -> Tensor:
    """Return the sum over ranks, rounded once. Shape: part [T, N] fp32; returns [T, N]."""
    out: Tensor = call(_Summed, part, exchange, dtype)
    return out


def gathered_columns(own: Tensor, first: int, exchange: ShardExchange) -> Tensor:
    """Return the columns of all ranks, of which this rank's begin at `first`.

    Shape: own [M, N]; returns [M, P N].
    """
    out: Tensor = call(_GatheredColumns, own, first, exchange)
    return out


class _SharedInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: ShardExchange) -> Tensor:
        ctx.exchange = exchange
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        part = grads[0].to(torch.float32, copy=True)  # which the sum may overwrite
        return ctx.exchange.sum(part, None, grads[0].dtype), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, exchange: ShardExchange, dtype: torch.dtype) -> Tensor:
        return exchange.sum(part, None, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].float(), None, None


class _GatheredColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, first: int, exchange: ShardExchange) -> Tensor:
        ctx.columns = slice(first, first + own.shape[1])
        return exchange.gather_columns(own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][:, ctx.columns], None, None
