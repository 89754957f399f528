"""Laying the sequences of a micro-batch so that nothing is computed twice, or for nobody.

A prompt which several of them share is there once, and what comes after the last token that
predicts one of the mask is not there at all. A token's bits depend on its own history alone
(docs/numerics.md), so no log-probability changes by this; the gradient of a shared prompt's tokens
is the sum over its sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spmd_rl.kernels.runtime.ragged import offsets_within
from spmd_rl.types.batch import Batch


@dataclass(frozen=True)
class Pieces:
    """Prompts that are shared, and sequences or what is left of them, end to end.

    Shape: `source` [T'], the batch's token at each laid place; `place` [T], where each of the
    batch's tokens lies, -1 for nowhere; `lengths`, `prefixes` [P], the tokens of each piece, and
    the earlier piece that it goes on from or -1.
    """

    source: NDArray[np.int64]
    place: NDArray[np.int64]
    lengths: NDArray[np.int32]
    prefixes: NDArray[np.int32]


def whole(batch: Batch) -> Pieces:
    """Every sequence a piece of its own."""
    tokens = np.arange(batch.num_tokens)
    return Pieces(tokens, tokens, batch.lengths, np.full(batch.num_sequences, -1, np.int32))


def shared(batch: Batch) -> Pieces:
    """What comes before the first token of the mask, where several sequences have the same there,
    as one piece.

    The pieces lie in the order of the batch, a shared prompt before the first of its sequences.
    """
    lengths = batch.lengths.astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    prompts, needed = _spans(batch, starts)
    first, is_shared = _first_with(batch, starts, prompts)
    is_leader = is_shared & (first == np.arange(len(first)))
    # Each sequence is up to two pieces, its prompt and the rest: [N, 2], of which those with tokens
    # are kept.
    sizes = np.stack(
        [np.where(is_leader, prompts, 0), np.where(is_shared, needed - prompts, needed)], axis=1
    )
    begins = np.stack([starts, np.where(is_shared, starts + prompts, starts)], axis=1)
    laid = (np.cumsum(sizes) - sizes.reshape(-1)).reshape(-1, 2)
    kept = sizes > 0
    number = (np.cumsum(kept) - 1).reshape(-1, 2)
    parents = np.stack([np.full(len(first), -1), np.where(is_shared, number[first, 0], -1)], axis=1)
    source = np.repeat((begins - laid).reshape(-1), sizes.reshape(-1)) + np.arange(sizes.sum())
    place = np.full(batch.num_tokens, -1)
    place[source] = np.arange(len(source))
    follows = np.flatnonzero(is_shared & ~is_leader)
    offset = offsets_within(prompts[follows])
    place[np.repeat(starts[follows], prompts[follows]) + offset] = (
        np.repeat(laid[first[follows], 0], prompts[follows]) + offset
    )
    return Pieces(source, place, sizes[kept].astype(np.int32), parents[kept].astype(np.int32))


def _spans(batch: Batch, starts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each sequence the tokens before the first of the mask, and before the last; both 0 where
    none is in it.
    """
    learned = np.flatnonzero(batch.mask)
    begin, end = np.searchsorted(learned, starts), np.searchsorted(learned, starts + batch.lengths)
    some = begin < end
    prompts, needed = np.zeros(len(starts), np.int64), np.zeros(len(starts), np.int64)
    prompts[some] = learned[begin[some]] - starts[some]
    needed[some] = learned[end[some] - 1] - starts[some]
    return prompts, needed


def _first_with(
    batch: Batch, starts: NDArray[np.int64], prompts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """For each sequence the first one that begins with the same prompt, and whether there are more."""
    seen: dict[bytes, int] = {}
    first = np.arange(len(starts))
    for number in np.flatnonzero(prompts).tolist():
        prompt = batch.tokens[starts[number] : starts[number] + prompts[number]]
        first[number] = seen.setdefault(prompt.tobytes(), number)
    return first, np.bincount(first)[first] > 1
