"""Sums and gathers over a group of ranks, with the gradient that each of them has."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.kernels.runtime.collectives import rows_of_ranks


class SumOver(torch.autograd.Function):
    """The sum of the ranks' tensors. Every rank goes on with the same sum, so that the gradient of
    its own term is that of the sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class GatherRows(torch.autograd.Function):
    """The rows of every rank, one rank after the other. Gradients of a row are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return rows_of_ranks(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return sum_own_rows(grads[0], ctx.group), None


def sum_own_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks of this rank's rows, in any order. Shape: [P T, N] to [T, N]."""
    parts = list(x.contiguous().chunk(group.size()))
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts, group=group)
    return own
