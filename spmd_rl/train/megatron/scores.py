"""Log-probs from hidden states, whose head is cut along its tokens.

With one rank along tp, they are computed as FSDP2's are: on a GPU, logits are dropped in the
forward pass (kernels/vocab/lm_head.py). With several, each rank has the logits of some tokens, and
a row needs three sums of one number each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spmd_rl.kernels import Scores, head_logprobs, linear_fp32, token_scores
from spmd_rl.kernels.vocab.kept_sets import KeptSets
from spmd_rl.kernels.vocab.kept_words import unpack_bits
from spmd_rl.train.megatron.sums import SumOver


@dataclass(frozen=True)
class ScoredRows:
    """The tokens to score at some hidden states. Shape: [m], candidates [m, K]."""

    targets: Tensor
    inv_temperature: Tensor
    candidates: Tensor | None = None
    kept: KeptSets | None = None

    def select(self, rows: Tensor) -> ScoredRows:
        """Return some of them."""
        kept = self.kept and self.kept.select(rows)
        candidates = None if self.candidates is None else self.candidates[rows]
        return ScoredRows(self.targets[rows], self.inv_temperature[rows], candidates, kept)


@dataclass(frozen=True)
class VocabularyHead:
    """This rank's rows of the head, the first of them, and the size of the whole vocabulary.

    Rows beyond the vocabulary pad it, and have no logits. With `recomputes`, logits are computed
    again in the backward pass on a GPU too.
    """

    weight: Tensor
    first: int
    vocab_size: int
    group: dist.ProcessGroup
    recomputes: bool

    def score(
        self, hidden: Tensor, rows: ScoredRows, max_rows: int, entropy_grad: bool = False
    ) -> Scores:
        """Return log-probs and entropies, of at most `max_rows` rows of logits at once.

        The entropy needs a gradient only with `entropy_grad`.
        Shape: hidden [m, C], with m > 0. Ranks: all along tp, with the same rows.
        """
        if hidden.is_cuda and not self.recomputes and self.group.size() == 1:
            return head_logprobs(
                hidden,
                self.weight,
                self.logits,
                rows.targets,
                rows.inv_temperature,
                max_rows,
                entropy_grad=entropy_grad,
                candidates=rows.candidates,
                kept=rows.kept,
            )
        if len(hidden) <= max_rows:
            return Scores(*self._score(hidden, rows, slice(None)))
        starts = range(0, len(hidden), max_rows)
        parts = [
            checkpoint(self._score, hidden, rows, slice(at, at + max_rows), use_reentrant=False)
            for at in starts
        ]
        logprobs, entropies, of_candidates = zip(*parts, strict=True)
        return Scores(
            torch.cat(logprobs),
            torch.cat(entropies),
            None if rows.candidates is None else torch.cat(of_candidates),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of this rank's tokens. Shape: hidden [m, C]; returns [m, V'] fp32."""
        num_own = min(len(self.weight), self.vocab_size - self.first)
        return linear_fp32(hidden, self.weight[:num_own])

    def _score(self, hidden: Tensor, rows: ScoredRows, chunk: slice) -> Scores:
        logits = self.logits(hidden[chunk])
        words = None if rows.kept is None else rows.kept.words(chunk, self.vocab_size)
        candidates = None if rows.candidates is None else rows.candidates[chunk]
        targets, inv_temperature = rows.targets[chunk], rows.inv_temperature[chunk]
        if self.group.size() == 1:
            return token_scores(logits, targets, inv_temperature, candidates, words)
        return self._score_shared(logits, targets, inv_temperature, candidates, words)

    def _score_shared(
        self,
        logits: Tensor,
        targets: Tensor,
        inv_temperature: Tensor,
        candidates: Tensor | None,
        words: Tensor | None,
    ) -> Scores:
        shifted = logits * inv_temperature[:, None]
        if words is not None:
            kept = unpack_bits(words, self.vocab_size)[:, self.first :][:, : logits.shape[1]]
            shifted = shifted.masked_fill(~kept, -torch.inf)
        top = shifted.detach().amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=self.group)
        shifted = shifted - top[:, None]
        terms = shifted.exp()
        total = SumOver.apply(terms.sum(-1), self.group)
        log_total = total.log()
        # a token outside of its set has no share of the entropy, and no gradient
        weighted = (terms * shifted.masked_fill(shifted == -torch.inf, 0.0)).sum(-1)
        entropy = log_total - SumOver.apply(weighted, self.group) / total
        picked = self._pick(shifted, targets[:, None])[:, 0]
        of_candidates = None
        if candidates is not None:
            of_candidates = self._pick(shifted, candidates) - log_total[:, None]
        return Scores(picked - log_total, entropy, of_candidates)

    def _pick(self, shifted: Tensor, ids: Tensor) -> Tensor:
        """Return the entries of all ranks at `ids` [m, K]."""
        own = ids - self.first
        is_own = (own >= 0) & (own < shifted.shape[1])
        found = shifted.gather(1, own.clamp(0, shifted.shape[1] - 1))
        return SumOver.apply(found.masked_fill(~is_own, 0.0), self.group)
