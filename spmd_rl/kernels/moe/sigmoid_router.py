"""Choice of experts by sigmoids: those of the largest corrected scores, in the best groups.

Shape letters: T tokens, E experts, K experts of a token, G groups of E / G neighbouring experts.
Source: DeepSeek-AI, DeepSeek-V3 Technical Report (2024), sections 2.1.2 and 2.1.3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmd_rl.kernels.moe.router import ExpertRoutes, in_slot_order
from spmd_rl.kernels.runtime.differentiable import call

EPS = 1e-20  # beside the sum that weights are divided by, as transformers has it


def route_by_sigmoid(
    logits: Tensor,
    correction: Tensor,
    num_chosen: int,
    *,
    groups: tuple[int, int],
    normalizes: bool,
    scale: float,
    ids: Tensor | None = None,
) -> ExpertRoutes:
    """Choose the experts of the largest sums of score and correction; of equal ones, lower ids.

    `groups` are how many there are and how many are chosen: those whose two best sums are largest
    together. With `ids`, these experts are taken instead. The correction is no part of the weights.
    With `normalizes`, a token's weights are divided by their sum, which is taken in slot order.
    Then `scale` multiplies them. Gradients go to the logits through the weights.
    Shape: logits [T, E] fp32, correction [E] fp32, ids [T, K] int64 in ascending order.
    """
    scores: Tensor = call(_Sigmoid, logits)
    if ids is None:
        ranked = _in_best_groups(scores.detach() + correction.detach(), *groups)
        ids = _best(ranked, num_chosen).sort(dim=-1).values
    weights = scores.gather(1, ids)
    if normalizes:
        weights = weights / (in_slot_order(weights) + EPS).unsqueeze(1)
    return ExpertRoutes(ids, weights * scale)


def _best(values: Tensor, count: int) -> Tensor:
    """Return the indices of the largest values of each row; of equal ones, the lower."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _in_best_groups(ranked: Tensor, num_groups: int, num_chosen: int) -> Tensor:
    """Return the values with -inf outside of each row's best groups. Shape: [T, E]."""
    if num_chosen == num_groups:
        return ranked
    by_group = ranked.unflatten(1, (num_groups, -1))
    two_best = by_group.sort(dim=-1, descending=True, stable=True).values[..., :2]
    chosen = _best(two_best.sum(-1), num_chosen)
    is_out = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(1, chosen, False)
    return by_group.masked_fill(is_out.unsqueeze(2), -torch.inf).flatten(1)


class _Sigmoid(torch.autograd.Function):
    """The sigmoid, spelled out: torch's on the CPU has bits that depend on a row's position."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.neg().exp_().add_(1.0).reciprocal_()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return grads[0] * out * (1.0 - out)
