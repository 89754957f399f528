"""Products of layers that several ranks share, with bits that no number of ranks changes.

A row-parallel product (of a layer whose ranks have columns of its weight) cuts K into as many equal
parts as the contract's `row_shards` says. Each part is one ascending chain from zero. Parts are
added in fp32, neighbours first, and the sum is rounded once, after a bias. So a rank may add the
parts that it has, and ranks may add their sums in the same order. A column-parallel product (of a
layer whose ranks have rows of its weight) is cut nowhere on GPUs, where each element has a chain of
its own. A CPU's library takes other chains for a few columns, so there it is one product a part.
Source: Zhang et al. (arXiv 2511.17826), who add parts in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from spmd_rl.kernels.linear.linear import is_exact, linear, linear_fp32
from spmd_rl.kernels.linear.shard_exchange import RowExchange, ShardExchange, rounded
from spmd_rl.kernels.runtime.differentiable import call
from spmd_rl.kernels.runtime.neighbour_sums import sum_neighbours
from spmd_rl.kernels.runtime.padding import dense


class SharedProduct(Protocol):
    """The product of a layer that ranks may share."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Shape: x [T, K], weight [N, K], bias [N]; returns [T, N] in x's dtype."""
        ...


@dataclass(frozen=True)
class ColumnParallel:
    """A product whose ranks have rows of the weight; this one has `num_parts` of the parts."""

    num_parts: int

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.device.type != "cpu" or self.num_parts == 1:
            return linear(x, weight, bias)
        biases = [None] * self.num_parts if bias is None else bias.chunk(self.num_parts)
        weights = weight.chunk(self.num_parts)
        pairs = zip(weights, biases, strict=True)
        return torch.cat([linear(x, dense(part), own) for part, own in pairs], 1)


@dataclass(frozen=True)
class RowParallel:
    """A product whose ranks have columns of the weight; this one has `num_parts` of the parts.

    Ranks that share the layer add what they have by `exchange`, so they call together and with
    equally many rows. With `rows`, each keeps its own rows of the sum. Gradients are those of the
    whole product: they take no part in the contract.
    """

    num_parts: int
    exchange: ShardExchange | None = None
    rows: RowExchange | None = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = call(_RowParallel, x, weight, bias, self)
        return out

    def own_sum(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Return the sum over this rank's parts plus a bias, rounded once. Shape: [T, N]."""
        if is_exact(x):
            from spmd_rl.kernels.linear.dispatch import matmul

            return matmul(x, weight, bias, dtype, self.num_parts)
        halves = zip(x.chunk(self.num_parts, 1), weight.chunk(self.num_parts, 1), strict=True)
        parts = [linear_fp32(dense(a), dense(b)) for a, b in halves]
        return rounded(sum_neighbours(parts), bias, dtype)


def shared_logits(hidden: Tensor, head: Tensor, part_rows: int) -> Tensor:
    """Return the logits of the vocabulary's rows in `head`, which begin a part of `part_rows`.

    Shape: hidden [M, C], head [V', C]; returns [M, V'] fp32.
    """
    if hidden.device.type != "cpu":
        return linear_fp32(hidden, head)
    return torch.cat([linear_fp32(hidden, dense(part)) for part in head.split(part_rows)], 1)


class _RowParallel(torch.autograd.Function):
    """The contract's tree forward, the library's product backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: RowParallel
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rows = layer.rows
        if layer.rows is not None:
            return layer.rows.sum_rows(layer.own_sum(x, weight), bias, x.dtype)
        if layer.exchange is not None:
            return layer.exchange.sum_later(layer.own_sum(x, weight), bias, x.dtype)
        return layer.own_sum(x, weight, bias, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad = grads[0] if ctx.rows is None else ctx.rows.rows(grads[0])
        return (
            grad @ weight if needs_x else None,
            grad.t() @ x if needs_weight else None,
            grads[0].sum(0) if needs_bias else None,
            None,
        )
