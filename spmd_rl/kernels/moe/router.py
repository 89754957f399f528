"""Choice of experts: which of them each token goes to, and with which weights.

Shape letters: T tokens, E experts, K experts of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ExpertRoutes(NamedTuple):
    """The experts of each token, in ascending order, and their weights.

    The order is that of the slots in which the experts' outputs are added. It does not depend on
    near-ties between weights. Shape: ids [T, K] int64, weights [T, K] fp32.
    """

    ids: Tensor
    weights: Tensor


def route(
    logits: Tensor, num_chosen: int, *, normalizes: bool, ids: Tensor | None = None
) -> ExpertRoutes:
    """Choose the experts of the largest probabilities; of equal ones, those of lower ids.

    With `ids`, these experts are taken instead. With `normalizes`, a token's weights are divided by
    their sum, which is taken in slot order. Gradients go to the logits through the weights.
    Shape: logits [T, E] fp32, ids [T, K] int64 in ascending order.
    """
    probabilities = logits.softmax(-1)
    if ids is None:
        best = probabilities.detach().sort(dim=-1, descending=True, stable=True).indices
        ids = best[:, :num_chosen].sort(dim=-1).values
    weights = probabilities.gather(1, ids)
    if normalizes:
        weights = weights / in_slot_order(weights).unsqueeze(1)
    return ExpertRoutes(ids, weights)


def in_slot_order(values: Tensor) -> Tensor:
    """Return the sum over slots, slot by slot. Shape: [T, K, ...] to [T, ...]."""
    first, *rest = values.unbind(1)
    for one in rest:
        first = first + one
    return first


def load_of(ids: Tensor, num_experts: int) -> Tensor:
    """Return how many slots each expert has. Shape: ids [T, K]; returns [E] int64."""
    return torch.bincount(ids.flatten(), minlength=num_experts)
