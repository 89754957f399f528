"""Log-probs from hidden states, computed as FSDP2's are.

On a GPU, logits are dropped in the forward pass (kernels/vocab/lm_head.py). Where ranks along tp
each have some rows of the head, they gather it, and each scores some of the hidden states with all
of it. So a log-prob has the bits that it has on one rank. The head has fewer bytes than logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spmd_rl.kernels import Scores, head_logprobs, token_scores
from spmd_rl.kernels.linear.row_shards import shared_logits
from spmd_rl.kernels.vocab.kept_sets import KeptSets
from spmd_rl.train.megatron.sums import GatherRows, SumOver


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
    """This rank's rows of the head, and the size of the whole vocabulary.

    Rows of all ranks beyond the vocabulary pad it, and have no logits. `part_rows` are those of one
    product on a CPU (kernels/linear/row_shards.py). With `recomputes`, logits are computed again in
    the backward pass on a GPU too.
    """

    weight: Tensor
    vocab_size: int
    part_rows: int
    group: dist.ProcessGroup
    recomputes: bool

    def score(
        self, hidden: Tensor, rows: ScoredRows, max_rows: int, entropy_grad: bool = False
    ) -> Scores:
        """Return log-probs and entropies, of at most `max_rows` rows of logits at once.

        The entropy needs a gradient only with `entropy_grad`. The gradient of `hidden` is a part of
        it on each rank.
        Shape: hidden [m, C], with m > 0. Ranks: all along tp, with the same rows.
        """
        count = self.group.size()
        if count == 1:
            return self._score(hidden, self.weight, rows, max_rows, entropy_grad)
        weight = GatherRows.apply(self.weight, self.group)
        own = torch.arange(len(hidden), device=hidden.device)[self.group.rank() :: count]
        scored = own if len(own) else own.new_zeros(1)  # then all take part in the gradients
        found = self._score(hidden[scored], weight, rows.select(scored), max_rows, entropy_grad)
        whole = partial(self._placed, at=own, num_rows=len(hidden))
        candidates = found.candidate_logprobs
        of_candidates = None if candidates is None else whole(candidates)
        return Scores(whole(found.logprobs), whole(found.entropy), of_candidates)

    def _placed(self, own: Tensor, at: Tensor, num_rows: int) -> Tensor:
        """Return what all ranks have scored, of which this one has `own` at the rows `at`."""
        placed = own.new_zeros(num_rows, *own.shape[1:]).index_copy(0, at, own[: len(at)])
        found: Tensor = SumOver.apply(placed, self.group)
        return found

    def _score(
        self, hidden: Tensor, weight: Tensor, rows: ScoredRows, max_rows: int, entropy_grad: bool
    ) -> Scores:
        """Return the scores of all rows, with the whole head in `weight`."""
        weight = weight[: self.vocab_size]
        if hidden.is_cuda and not self.recomputes:
            return head_logprobs(
                hidden,
                weight,
                partial(self.logits, weight=weight),
                rows.targets,
                rows.inv_temperature,
                max_rows,
                entropy_grad=entropy_grad,
                candidates=rows.candidates,
                kept=rows.kept,
            )
        if len(hidden) <= max_rows:
            return self._score_chunk(hidden, weight, rows, slice(None))
        parts = [
            checkpoint(
                self._score_chunk, hidden, weight, rows, slice(at, at + max_rows),
                use_reentrant=False,
            )
            for at in range(0, len(hidden), max_rows)
        ]  # fmt: skip
        logprobs, entropies, of_candidates = zip(*parts, strict=True)
        return Scores(
            torch.cat(logprobs),
            torch.cat(entropies),
            None if rows.candidates is None else torch.cat(of_candidates),
        )

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return logits. Shape: hidden [m, C], weight [V, C] of the whole head; [m, V] fp32."""
        return shared_logits(hidden, weight, self.part_rows)

    def _score_chunk(
        self, hidden: Tensor, weight: Tensor, rows: ScoredRows, chunk: slice
    ) -> Scores:
        logits = self.logits(hidden[chunk], weight)
        words = None if rows.kept is None else rows.kept.words(chunk, self.vocab_size)
        candidates = None if rows.candidates is None else rows.candidates[chunk]
        return token_scores(
            logits, rows.targets[chunk], rows.inv_temperature[chunk], candidates, words
        )
