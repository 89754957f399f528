"""Packing of preference pairs for DPO and reward models. numpy only.

In a batch of pairs, sequence 2i is the chosen answer of pair i and sequence 2i + 1 the rejected
one. Pairs are never split over ranks or micro-batches. Weights are 1 and the denominator is the
number of pairs, so that the loss is a mean over pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spmd_rl.algo.by_source import source_columns
from spmd_rl.algo.packing import TokensAndMask, pack_sft
from spmd_rl.errors import ContractError
from spmd_rl.types.batch import Batch
from spmd_rl.types.columns import offsets_of
from spmd_rl.types.sft_pair import SftPair

Pair = tuple[TokensAndMask, TokensAndMask]  # chosen and rejected

PAIR_SCALE = "pair_scale"  # a column of a batch of pairs


def pack_pairs(pairs: Sequence[Pair]) -> Batch:
    """Return (chosen, rejected) pairs of (tokens, mask) as a batch for `dpo_loss`.

    `sequence_ends` makes of it a batch for `bradley_terry_loss`.

    The column "pair_scale" holds tokens / pairs of the whole batch at the first learned token of
    each pair, and 0 elsewhere. A pair's measurement times this column has its mean over pairs as
    its mean over tokens, which is what the trainer reports. Pairs of several sources are measured
    by source, too.
    Raises: ContractError for a pair without a token to learn.
    """
    batch = pack_sft([sequence for pair in pairs for sequence in pair])
    offsets = offsets_of(batch.lengths)[::2]
    learned = np.flatnonzero(batch.mask)
    first = np.searchsorted(learned, offsets[:-1])
    if (np.searchsorted(learned, offsets[1:]) == first).any():
        raise ContractError("a pair has no token to learn: both answers are empty")
    scale = np.zeros(batch.num_tokens, np.float32)
    scale[learned[first]] = len(learned) / len(pairs)
    sources = [SftPair(*chosen).source for chosen, _ in pairs]
    columns = source_columns(sources, np.ones(len(pairs), np.int64), np.diff(offsets))
    columns[PAIR_SCALE] = scale
    return replace(batch, denominator=float(len(pairs)), unit=2, columns=columns)
