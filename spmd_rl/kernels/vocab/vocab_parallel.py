"""Sampling where ranks have parts of the vocabulary: what `sample_and_score` does, bit for bit.

A part is whole shards of the sum over the vocabulary (logprob.py), in their order. So each rank
sums its own shards, and all ranks add the shards of all in the one order. Two exchanges of a few
words a row take the place of the row's logits:

1. Each rank gives its greatest logit / T and the best entry of its draw, with its id. All choose
   the best entry of all. Of equal ones, the lowest id wins, which the first rank has.
2. Each rank gives its sums of exp(z - m), where m is the greatest of all.

Filters order whole rows, so they need whole rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.kernels.vocab.logprob import chunk_sums, shard_size
from spmd_rl.kernels.vocab.sampling import noisy_scores, position_keys
from spmd_rl.kernels.vocab.vocab_part import BEST, CHOSEN, ENTRY_WORDS, ID, MAXIMUM, VocabPart


def vocab_parallel_sample(
    logits: Tensor,
    inv_temperature: Tensor,
    bases: Tensor,
    positions: Tensor,
    part: VocabPart,
    *,
    greedy: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw tokens of the whole vocabulary and return them with their log-probabilities.

    Shape: logits [M, V'] fp32 of this rank's part; all else, and what is returned, as of
    `sample_and_score`. Ranks: all that share the vocabulary, with the same rows. Blocks: as the
    exchange does.
    """
    entries_of, sums_of, drawn_of = _entries, _sums, _drawn
    if logits.is_cuda:
        from spmd_rl.kernels.vocab import vocab_parallel_triton as kernels

        entries_of, sums_of, drawn_of = kernels.entries, kernels.sums, kernels.drawn
    own = entries_of(logits, inv_temperature, bases, positions, greedy, part)
    entries = part.exchange.gather_columns(own).view(len(own), part.count, ENTRY_WORDS)
    sums = part.exchange.gather_columns(sums_of(logits, inv_temperature, entries, part))
    return drawn_of(entries, sums)


def _entries(
    logits: Tensor,
    inv_temperature: Tensor,
    bases: Tensor,
    positions: Tensor,
    greedy: Tensor | None,
    part: VocabPart,
) -> Tensor:
    """Return what this rank gives of each row in the first exchange. Shape: [M, 4] int32."""
    keys = position_keys(bases, positions)
    entries = noisy_scores(logits, inv_temperature, keys, greedy, part.first)
    scores, best = logits * inv_temperature.unsqueeze(1), entries.argmax(1, keepdim=True)
    numbers = scores.amax(1, keepdim=True), entries.gather(1, best), scores.gather(1, best)
    return torch.cat([torch.cat(numbers, 1).view(torch.int32), (best + part.first).int()], 1)


def _sums(logits: Tensor, inv_temperature: Tensor, entries: Tensor, part: VocabPart) -> Tensor:
    """Return this rank's sums of exp(z - m), one a chunk. Shape: entries [M, P, 4] int32."""
    terms = logits * inv_temperature.unsqueeze(1)
    terms -= _maximum(entries).unsqueeze(1)
    return chunk_sums(terms.exp_(), shard_size(part.size), part.num_shards)


def _drawn(entries: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens [M] int64 and log-probs [M], from what all ranks gave.

    Shape: entries [M, P, 4] int32, sums [M, any].
    """
    numbers = entries.view(torch.float32)
    winner = numbers[..., BEST].argmax(1, keepdim=True)
    tokens = entries[..., ID].gather(1, winner).squeeze(1).long()
    chosen = numbers[..., CHOSEN].gather(1, winner).squeeze(1)
    return tokens, (chosen - _maximum(entries)) - sums.sum(-1).log()


def _maximum(entries: Tensor) -> Tensor:
    return entries.view(torch.float32)[..., MAXIMUM].amax(1)
