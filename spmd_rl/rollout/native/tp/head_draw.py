"""HeadDraw: from the last hidden states of rows to their next tokens.

Where ranks share a model, each has some logits of every row. Of these they draw together, and give
each other a few words a row (kernels/vocab/vocab_parallel.py). Filters order whole rows, and so may
a sampler of the caller's own. Then ranks gather whole rows, and each draws from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from spmd_rl.kernels import sample_and_score
from spmd_rl.kernels.vocab.kept_words import KeptRows
from spmd_rl.kernels.vocab.vocab_parallel import vocab_parallel_sample
from spmd_rl.kernels.vocab.vocab_part import VocabPart
from spmd_rl.model.network import CausalLM

Sampler = Callable[..., tuple[Tensor, Tensor]]  # has the signature of `sample_and_score`


@dataclass(frozen=True)
class HeadDraw:
    """Draws with `sampler` from the logits of the model's head."""

    model: CausalLM
    sampler: Sampler

    def __call__(
        self,
        hidden: Tensor,
        inv_temperature: Tensor,
        bases: Tensor,
        positions: Tensor,
        *,
        greedy: Tensor | None,
        kept: KeptRows | None = None,
        **filters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return tokens and their log-probs, as `sample_and_score` does.

        Shape: hidden [M, C]. Ranks: all that share the model, with the same rows and filters.
        """
        asked, part = (inv_temperature, bases, positions), self._vocab_part()
        if part is not None and not filters:
            logits = self.model.own_logits(hidden)
            return vocab_parallel_sample(logits, *asked, part, greedy=greedy)
        logits = self.model.logits(hidden)
        return self.sampler(logits, *asked, greedy=greedy, kept=kept, **filters)

    def _vocab_part(self) -> VocabPart | None:
        """Return this rank's part of the vocabulary if rows are drawn by parts."""
        part = self.model.part
        if part.exchange is None or self.sampler is not sample_and_score:
            return None
        return VocabPart(part.index, part.count, self.model.spec.vocab_size, part.exchange)
