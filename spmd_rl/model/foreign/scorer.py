"""Scorer of a model that `transformers` computes."""

from __future__ import annotations

from torch import Tensor

from spmd_rl.model.foreign.network import ForeignLM
from spmd_rl.model.scorer import ScoredTokens, Scorer


class ForeignScorer(Scorer):
    """A `Scorer` that gives the network whole sequences, each in a row of its own.

    Logits are computed again in the backward pass: the head's own products are not known here.
    """

    model: ForeignLM

    def __init__(self, model: ForeignLM, logit_rows: int) -> None:
        super().__init__(model, logit_rows, recomputes=True)

    def hidden(self, batch: ScoredTokens) -> Tensor:
        return self.model.hidden_states(batch.tokens, batch.lengths)
