"""Loads of experts in a forward pass: how many tokens went to each, layer by layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ExpertLoads:
    """What the mixtures of a model saw of the first `num_rows` tokens; the rest are padding.

    With `balances`, it keeps what the loss that balances experts is made of, with its gradient. A
    layer that is computed again for its backward pass does the same, and counts once.
    Shape letters: L layers with experts, E experts of each.
    """

    def __init__(self, num_rows: int, balances: bool) -> None:
        self.num_rows = num_rows
        self._balances = balances
        self._counts: dict[nn.Module, Tensor] = {}
        self._probabilities: dict[nn.Module, Tensor] = {}

    def add(self, layer: nn.Module, logits: Tensor, ids: Tensor) -> None:
        """Add the routes of a layer. Shape: logits [T, E] fp32, ids [T, K] int64."""
        sums = logits[: self.num_rows].softmax(-1).sum(0) if self._balances else None
        if layer in self._counts:
            return
        chosen = ids[: self.num_rows].flatten()
        counts = torch.zeros(logits.shape[1], dtype=torch.int64, device=ids.device)
        self._counts[layer] = counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        if sums is not None:
            self._probabilities[layer] = sums

    def counts(self) -> Tensor:
        """Return the tokens of each expert. Shape: [L, E] int64."""
        return torch.stack(list(self._counts.values()))

    def balance(self) -> Tensor:
        """Return the loss that balances loads. It is K where all loads or probabilities are even.

        It is the mean over layers of E times the sum over experts of how many of the tokens it has,
        as a share, times its mean probability. transformers pools the layers instead, where those
        that collapse onto different experts look even.
        Source: Fedus et al., Switch Transformers (2021), section 2.2.
        """
        counts, num_rows = self.counts(), max(self.num_rows, 1)
        share = counts / num_rows
        probability = torch.stack(list(self._probabilities.values())) / num_rows
        return counts.shape[1] * (share * probability).sum(-1).mean()
