"""Replay of recorded routes: a trainer's mixtures take the experts that the engine took."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RouteReplay:
    """The experts that were recorded for the first rows of a forward pass; the rest are padding.

    It counts where the router would have chosen others. A layer that is computed again for its
    backward pass replays the same routes, and counts once.
    Shape letters: T rows, L mixtures, K experts of a token.
    """

    def __init__(self, ids: Tensor, num_layers: int) -> None:
        """`ids` are those of types/routes.py. Shape: [T, L * K], of any integer dtype."""
        self._ids = ids.long().unflatten(1, (num_layers, -1))
        self._numbers: dict[nn.Module, int] = {}
        self._rerouted: dict[nn.Module, Tensor] = {}

    def join(self, layer: nn.Module) -> None:
        """Have `layer` replay the routes of the next mixture."""
        self._numbers[layer] = len(self._numbers)

    def experts_of(self, layer: nn.Module, own: Tensor) -> Tensor:
        """Return the experts that `layer` takes, where `own` are those that its router chose.

        A row for which nothing was recorded keeps its own. Shape: [T', K] int64, T' >= T.
        """
        ids = self._ids[:, self._numbers[layer]]
        is_recorded = ids[:, -1:] > 0  # ids ascend, so that the last one is 0 for zeros alone
        first = own[: len(ids)]
        taken = torch.where(is_recorded, ids, first)
        if layer not in self._rerouted:
            self._rerouted[layer] = (taken != first).any(1).sum()
        return torch.cat([taken, own[len(ids) :]])

    def counts(self) -> Tensor:
        """Return the rows whose router would have chosen others, and the rows that were recorded.

        Shape: [L, 2] int64.
        """
        num_recorded = (self._ids[..., -1] > 0).sum(0)
        return torch.stack([torch.stack(list(self._rerouted.values())), num_recorded], 1)
