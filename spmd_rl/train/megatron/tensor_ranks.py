"""Products of the local layer spec whose weights ranks along tp share, in the contract's sums.

A rank has some rows of a weight (of queries, keys and values, of gate and up) or some columns (of
the output projection, of down). With sequence parallelism, ranks share the tokens between such a
pair of products. Then rows are gathered before the pair, and each rank adds its own rows after it.
No choice changes a bit of the forward pass (kernels/linear/row_shards.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.kernels import linear
from spmd_rl.kernels.linear.row_shards import ColumnParallel, RowParallel
from spmd_rl.kernels.linear.shard_exchange import TorchExchange
from spmd_rl.kernels.runtime.collectives import rows_of_ranks
from spmd_rl.train.megatron.sums import sum_own_rows


@dataclass(frozen=True)
class TensorRanks:
    """The ranks along tp, and in how many parts the model sums row-parallel products.

    With `splits_tokens` (sequence parallelism), each rank has some of the tokens outside of a pair
    of products. All ranks of the group call each method together.
    """

    group: dist.ProcessGroup
    row_shards: int
    splits_tokens: bool

    @property
    def count(self) -> int:
        return self.group.size()

    @property
    def num_parts(self) -> int:
        """The parts of a sum that one rank has."""
        return self.row_shards // self.count

    def column_product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, widths: Sequence[int]
    ) -> Tensor:
        """Return the product with this rank's rows of a weight, which are projections of `widths`.

        Shape: x [T, K] or, where ranks split tokens, this rank's of them; weight [N, K], bias [N];
        returns [T, N].
        """
        if self.count == 1:
            return _projections(x, weight, bias, widths, self.num_parts)
        out: Tensor = _ColumnProduct.apply(x, weight, bias, tuple(widths), self)
        return out

    def row_product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the product of which this rank has some columns of the weight.

        Shape: x [T, K], weight [N, K]; returns [T, N], or this rank's rows of it.
        """
        if self.row_shards == 1:
            return linear(x, weight)
        if self.count == 1:
            return RowParallel(self.num_parts)(x, weight, None)
        out: Tensor = _RowProduct.apply(x, weight, self)
        return out

    def sum(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum over ranks in the contract's order, rounded to `dtype`.

        Shape: part [T, N] fp32; returns [T, N], or this rank's rows of it.
        """
        exchange = TorchExchange(self.group)
        total = exchange.sum_rows if self.splits_tokens else exchange.sum
        return total(part, None, dtype)

    def gathered(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks, where they split tokens."""
        return rows_of_ranks(x, self.group) if self.splits_tokens else x


def _projections(
    x: Tensor, weight: Tensor, bias: Tensor | None, widths: Sequence[int], num_parts: int
) -> Tensor:
    """Return the projections, one after the other, each in `num_parts` parts of the contract's.

    They are products of their own on a CPU, where bits may depend on the number of columns.
    """
    if x.is_cuda:
        return linear(x, weight, bias)
    product = ColumnParallel(num_parts)
    weights = weight.split(list(widths))
    biases = [None] * len(weights) if bias is None else bias.split(list(widths))
    return torch.cat([product(x, *pair) for pair in zip(weights, biases, strict=True)], -1)


class _ColumnProduct(torch.autograd.Function):
    """Keeps this rank's tokens alone, and gathers the others again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        widths: Sequence[int],
        ranks: TensorRanks,
    ) -> Tensor:
        ctx.ranks = ranks
        ctx.save_for_backward(x, weight)
        return _projections(ranks.gathered(x), weight, bias, widths, ranks.num_parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ranks, grad = ctx.ranks, grads[0]
        grad_x, pending = grad @ weight, None
        if ranks.splits_tokens:
            grad_x = sum_own_rows(grad_x, ranks.group)
        else:
            pending = dist.all_reduce(grad_x, group=ranks.group, async_op=True)
        grad_weight = grad.t() @ ranks.gathered(x)
        grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        if pending is not None:
            pending.wait()
        return grad_x, grad_weight, grad_bias, None, None


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        ctx.save_for_backward(x, weight)
        return ranks.sum(RowParallel(ranks.num_parts).own_sum(x, weight), x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = ctx.ranks.gathered(grads[0])
        return grad @ weight, grad.t() @ x, None
