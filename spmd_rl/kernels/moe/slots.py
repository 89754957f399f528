"""Slots of a mixture: a token's row goes to each of its experts, and what they give is added.

Both directions read rows by index, forward and backward, so that no sum depends on an order of
threads. Shape letters: T tokens, K experts of a token, S = T K slots, C hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from spmd_rl.kernels.moe.router import in_slot_order, load_of
from spmd_rl.kernels.runtime.differentiable import call


class SlotOrder(NamedTuple):
    """Slots in the order of their experts, and for each expert how many it has.

    Slots of one expert are in the order of their tokens.
    Shape: `tokens` and `slots` [S] int64: of each row, its token and its slot of all; `rows`
    [T, K] int64: the row of each slot.
    """

    tokens: Tensor
    slots: Tensor
    rows: Tensor
    counts: list[int]


def by_expert(ids: Tensor, num_experts: int) -> SlotOrder:
    """Order the slots of `ids` [T, K]. Waits for the device: the counts are on the host."""
    slots = ids.flatten().argsort(stable=True)
    rows = torch.empty_like(slots)
    rows[slots] = torch.arange(len(slots), device=ids.device)
    counts = load_of(ids, num_experts).tolist()
    return SlotOrder(slots // ids.shape[1], slots, rows.view_as(ids), counts)


def to_experts(x: Tensor, order: SlotOrder) -> Tensor:
    """Return the row of each slot's token, expert by expert. Shape: x [T, C]; returns [S, C]."""
    out: Tensor = call(_ToExperts, x, order.tokens, order.rows)
    return out


def by_row(values: Tensor, order: SlotOrder) -> Tensor:
    """Return the value of each row's slot. Shape: values [T, K]; returns [S]."""
    column = values.reshape(-1, 1)
    out: Tensor = call(_ToExperts, column, order.slots, order.rows.reshape(-1, 1))
    return out.squeeze(1)


def from_experts(y: Tensor, order: SlotOrder) -> Tensor:
    """Return each token's sum over its slots: in slot order, in fp32, rounded once.

    Shape: y [S, C]; returns [T, C].
    """
    out: Tensor = call(_FromExperts, y, order.tokens, order.rows)
    return out


def _sums(rows: Tensor, of_slot: Tensor) -> Tensor:
    return in_slot_order(rows[of_slot].float()).to(rows.dtype)


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return x[tokens]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return _sums(grads[0], rows), None, None


class _FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        return _sums(y, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        return grads[0][tokens], None, None
