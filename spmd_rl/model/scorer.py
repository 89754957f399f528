"""Scorer: the model with its head, from packed tokens to log-probabilities."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spmd_rl.errors import ContractError
from spmd_rl.kernels import (
    PackedAttention,
    Scores,
    TokenAttention,
    candidate_logprobs,
    head_logprobs,
    token_scores,
)
from spmd_rl.kernels.attention.shared_tokens import SharedAttention, SharedTokens
from spmd_rl.kernels.vocab.kept_sets import KeptSets
from spmd_rl.model.network import CausalLM


class ScoredTokens(Protocol):
    """Packed sequences, and the tokens of them to score.

    `rows` are the positions whose hidden state predicts a token of `targets`. `kept` has the sets
    over which tokens are scored; None is the whole vocabulary. With `shared`, they are this rank's
    rows of sequences that other ranks share.
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
    def kept(self) -> KeptSets | None: ...

    @property
    def shared(self) -> SharedTokens | None: ...

    @property
    def num_scored(self) -> int: ...


CANDIDATES_OF_SETS = (
    "the log-probs of candidates are those over the whole vocabulary, but this batch has the sets "
    "that top_k, top_p or min_p kept: set sampling.replay_filters = false"
)


def hidden_states(model: CausalLM, batch: ScoredTokens, attention_split: int) -> Tensor:
    """Return the model's hidden states after the last norm.

    Shape: [T, C].
    """
    attend: TokenAttention = PackedAttention(
        batch.lengths,
        device=batch.tokens.device,
        prefixes=batch.prefixes,
        split=attention_split,
        exponents=model.exponents,
    )
    if batch.shared is not None:
        attend = SharedAttention(attend, batch.shared)
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

    def hidden(self, batch: ScoredTokens) -> Tensor:
        """Return the hidden states that the head reads. Shape: [T, C]."""
        return hidden_states(self.model, batch, self.attention_split)

    def forward(
        self, batch: ScoredTokens, entropy_grad: bool = False, candidates: Tensor | None = None
    ) -> Scores:
        """Return log-probability and entropy of the scored tokens, and log-probs of candidates.

        The entropy has a gradient only with `entropy_grad`.
        Shape: candidates [M, K] int64. Raises: ContractError for candidates beside kept sets.
        """
        if candidates is not None and batch.kept is not None:
            raise ContractError(CANDIDATES_OF_SETS)
        hidden = self.hidden(batch)
        if hidden.is_cuda and not self.recomputes and batch.num_scored > 0:
            return head_logprobs(
                hidden.index_select(0, batch.rows),
                self.model.head,
                self.model.logits,
                batch.targets,
                batch.inv_temperature,
                self.logit_rows,
                entropy_grad=entropy_grad,
                candidates=candidates,
                kept=batch.kept,
                rows=self.model.head_rows,
            )
        scores = self._score_in_chunks(hidden, batch, candidates)
        return scores if entropy_grad else scores._replace(entropy=scores.entropy.detach())

    def _score_in_chunks(
        self, hidden: Tensor, batch: ScoredTokens, candidates: Tensor | None
    ) -> Scores:
        if batch.num_scored == 0:
            return self._score_nothing(hidden, batch, candidates)
        if batch.num_scored <= self.logit_rows:
            return self._score(hidden, batch, candidates, slice(None))
        starts = range(0, batch.num_scored, self.logit_rows)
        chunks = [slice(start, start + self.logit_rows) for start in starts]
        parts = [
            checkpoint(self._score, hidden, batch, candidates, chunk, use_reentrant=False)
            for chunk in chunks
        ]
        logprobs, entropies, of_candidates = zip(*parts, strict=True)
        return Scores(
            torch.cat(logprobs),
            torch.cat(entropies),
            None if candidates is None else torch.cat(of_candidates),
        )

    def top_logprobs(self, batch: ScoredTokens, num_top: int) -> tuple[Tensor, Tensor]:
        """Return the likeliest tokens at each scored position and their log-probs, best first.

        No gradient is kept.
        Shape: [M, K] int32, and [M, K] fp32.
        """
        hidden = self.hidden(batch)
        if batch.num_scored == 0:
            nothing = hidden.new_empty((0, num_top), dtype=torch.float32)
            return nothing.int(), nothing
        chunks = []
        for start in range(0, batch.num_scored, self.logit_rows):
            chunk = slice(start, start + self.logit_rows)
            logits = self.model.logits(hidden.index_select(0, batch.rows[chunk]))
            ids = logits.topk(num_top).indices
            logprobs = candidate_logprobs(logits, ids, batch.inv_temperature[chunk])
            chunks.append((ids.int(), logprobs))
        ids, logprobs = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        return ids, logprobs

    def _score(
        self, hidden: Tensor, batch: ScoredTokens, candidates: Tensor | None, chunk: slice
    ) -> Scores:
        logits = self.model.logits(hidden.index_select(0, batch.rows[chunk]))
        of_chunk = None if candidates is None else candidates[chunk]
        words = None if batch.kept is None else batch.kept.words(chunk, logits.shape[1])
        return token_scores(
            logits, batch.targets[chunk], batch.inv_temperature[chunk], of_chunk, words
        )

    def _score_nothing(
        self, hidden: Tensor, batch: ScoredTokens, candidates: Tensor | None
    ) -> Scores:
        """Return empty scores whose gradient reaches every parameter, the head's too.

        The gradient is zero, but the collectives of the other ranks wait for it.
        """
        ones = torch.ones(1, device=batch.tokens.device)
        logits = self.model.logits(hidden[:1])
        if candidates is not None:
            candidates = candidates.new_zeros(1, candidates.shape[1])
        scores = token_scores(logits, batch.tokens[:1], ones, candidates)
        logprobs, entropy, of_candidates = scores
        return Scores(
            logprobs.index_select(0, batch.rows),
            entropy.index_select(0, batch.rows),
            None if of_candidates is None else of_candidates.index_select(0, batch.rows),
        )
