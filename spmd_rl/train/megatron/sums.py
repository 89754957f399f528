"""Sums and gathers over a group of ranks, with the gradient that each of them has."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        whole = grads[0].contiguous()
        dist.all_reduce(whole, group=ctx.group)
        return whole.chunk(ctx.group.size())[ctx.group.rank()], None
