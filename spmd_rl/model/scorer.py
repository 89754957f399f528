"""Scorer: the model with its head, from packed tokens to log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spmd_rl.kernels import PackedAttention, head_logprobs, token_logprobs
from spmd_rl.model.network import CausalLM


# tensors of some rows, from their logits [m, V] and inverse temperatures [m]
PickFromLogits = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


class ScoredTokens(Protocol):
    """Packed sequences, and the tokens of them to score.

    `rows` are the positions whose hidden state predicts a token of `targets`.
    Shape: tokens, positions [T]; lengths, prefixes [P] on the host; rows, targets, inv_temperature
    [M].
    """

    @property
    def tokens(self) -> Tensor: ...

    @property
    def positions(self) -> Tensor: ...

    @property
    def lengths(self) -> NDArray[np.int32]: ...

    @property
    def prefixes(self) -> NDArray[np.int32]: ...

    @property
    def rows(self) -> Tensor: ...

    @property
    def targets(self) -> Tensor: ...

    @property
    def inv_temperature(self) -> Tensor: ...

    @property
    def num_scored(self) -> int: ...


def hidden_states(model: CausalLM, batch: ScoredTokens, attention_split: int) -> Tensor:
    """Return the model's hidden states after the last norm.

    Shape: [T, C].
    """
    attend = PackedAttention(
        batch.lengths,
        num_heads=model.spec.num_heads,
        num_kv_heads=model.spec.num_kv_heads,
        device=batch.tokens.device,
        prefixes=batch.prefixes,
        split=attention_split,
    )
    hidden: Tensor = model(batch.tokens, batch.positions, attend)
    return hidden


class Scorer(nn.Module):
    """The module that FSDP wraps as its root, so that the head's weights are gathered too.

    At most `logit_rows` rows of fp32 logits exist at once. With `recomputes`, logits are computed
    again in the backward pass on a GPU too.
    """

    def __init__(
        self, model: CausalLM, logit_rows: int, recomputes: bool, attention_split: int = 0
    ) -> None:
        super().__init__()
        self.model = model
        self.logit_rows = logit_rows
        self.attention_split = attention_split
        self.recomputes = recomputes

    def forward(self, batch: ScoredTokens, pick: PickFromLogits | None = None) -> Any:
        """Return log-probability and entropy of the scored tokens, or what `pick` takes instead.

        `pick` is only called where no gradient is needed.
        Shape: both [M].
        """
        hidden = hidden_states(self.model, batch, self.attention_split)
        if pick is not None:
            return self._picked(hidden, batch, pick)
        if batch.num_scored == 0:
            return self._score_nothing(hidden, batch)
        if hidden.is_cuda and not self.recomputes:
            rows = hidden.index_select(0, batch.rows)
            targets = batch.targets, batch.inv_temperature
            return head_logprobs(
                rows, self.model.head, self.model.logits, *targets, self.logit_rows
            )
        if batch.num_scored <= self.logit_rows:
            return self._score(hidden, batch, slice(None))
        starts = range(0, batch.num_scored, self.logit_rows)
        chunks = [slice(start, start + self.logit_rows) for start in starts]
        scores = [
            checkpoint(self._score, hidden, batch, chunk, use_reentrant=False) for chunk in chunks
        ]
        logprobs, entropies = zip(*scores, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _picked(
        self, hidden: Tensor, batch: ScoredTokens, pick: PickFromLogits
    ) -> tuple[Tensor, ...]:
        """Return what `pick` takes of the logits of all scored tokens, chunk by chunk."""
        if batch.num_scored == 0:
            one = torch.ones(1, device=hidden.device)
            return tuple(part[:0] for part in pick(self.model.logits(hidden[:1]), one))
        chunks = []
        for start in range(0, batch.num_scored, self.logit_rows):
            chunk = slice(start, start + self.logit_rows)
            logits = self.model.logits(hidden.index_select(0, batch.rows[chunk]))
            chunks.append(pick(logits, batch.inv_temperature[chunk]))
        return tuple(torch.cat(parts) for parts in zip(*chunks, strict=True))

    def _score(self, hidden: Tensor, batch: ScoredTokens, chunk: slice) -> tuple[Tensor, Tensor]:
        logits = self.model.logits(hidden.index_select(0, batch.rows[chunk]))
        return token_logprobs(logits, batch.targets[chunk], batch.inv_temperature[chunk])

    def _score_nothing(self, hidden: Tensor, batch: ScoredTokens) -> tuple[Tensor, Tensor]:
        """Return empty scores whose gradient reaches every parameter, the head's too.

        The gradient is zero, but the collectives of the other ranks wait for it.
        """
        ones = torch.ones(1, device=batch.tokens.device)
        logits = self.model.logits(hidden[:1])
        logprobs, entropy = token_logprobs(logits, batch.tokens[:1], ones)
        return logprobs.index_select(0, batch.rows), entropy.index_select(0, batch.rows)
