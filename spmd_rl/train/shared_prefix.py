"""Packing of a micro-batch that computes a prompt once for all sequences that share it.

Tokens after the last one that predicts a token of the mask are left out. A token's bits depend on
its own history alone (docs/numerics.md), so no log-probability changes by this. The gradient of a
shared prompt's tokens is the sum over its sequences.

A segment is a run of packed tokens: a shared prompt, what follows one, or a whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spmd_rl.kernels.runtime.ragged import offsets_within
from spmd_rl.types.batch import Batch


@dataclass(frozen=True)
class PackedLayout:
    """Segments end to end, and where the tokens of a batch are among them.

    Shape: `source` [T'], the batch's token at each packed position; `position` [T], the packed
    position of each of the batch's tokens, -1 for none; `lengths`, `prefixes` [P], the tokens of
    each segment, and the earlier segment that it continues or -1.
    """

    source: NDArray[np.int64]
    position: NDArray[np.int64]
    lengths: NDArray[np.int32]
    prefixes: NDArray[np.int32]


def pack_whole(batch: Batch) -> PackedLayout:
    """Return a layout in which every sequence is a segment of its own."""
    tokens = np.arange(batch.num_tokens)
    prefixes = np.full(batch.num_sequences, -1, np.int32)
    return PackedLayout(tokens, tokens, batch.lengths, prefixes)


def pack_shared(batch: Batch) -> PackedLayout:
    """Return a layout in which equal prompts of several sequences are one segment.

    A prompt is what comes before the first token of the mask. Segments lie in the order of the
    batch, a shared prompt before the first of its sequences.
    """
    lengths = batch.lengths.astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    prompts, needed = _prompt_and_needed_tokens(batch, starts)
    first, is_shared = _first_with_same_prompt(batch, starts, prompts)
    is_first = is_shared & (first == np.arange(len(first)))
    sizes = _segment_sizes(prompts, needed, is_first, is_shared)
    begins = np.stack([starts, np.where(is_shared, starts + prompts, starts)], axis=1)
    packed_begins = (np.cumsum(sizes) - sizes.reshape(-1)).reshape(-1, 2)
    shifts = np.repeat((begins - packed_begins).reshape(-1), sizes.reshape(-1))
    source = shifts + np.arange(sizes.sum())
    position = np.full(batch.num_tokens, -1)
    position[source] = np.arange(len(source))
    # the prompts of later sequences are where that of the first is
    later = np.flatnonzero(is_shared & ~is_first)
    offset = offsets_within(prompts[later])
    own = np.repeat(starts[later], prompts[later]) + offset
    position[own] = np.repeat(packed_begins[first[later], 0], prompts[later]) + offset
    kept = sizes > 0
    parents = _parents(kept, first, is_shared)
    return PackedLayout(
        source, position, sizes[kept].astype(np.int32), parents[kept].astype(np.int32)
    )


def _segment_sizes(
    prompts: NDArray[np.int64],
    needed: NDArray[np.int64],
    is_first: NDArray[np.bool_],
    is_shared: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Return the sizes of each sequence's two segments, its prompt and the rest.

    A segment without tokens is not kept. Shape: [N, 2].
    """
    prompt_sizes = np.where(is_first, prompts, 0)
    rest_sizes = np.where(is_shared, needed - prompts, needed)
    return np.stack([prompt_sizes, rest_sizes], axis=1)


def _parents(
    kept: NDArray[np.bool_], first: NDArray[np.int64], is_shared: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return the number of the segment that each one continues, -1 for none.

    Shape: `kept` and the result are [N, 2].
    """
    number = (np.cumsum(kept) - 1).reshape(-1, 2)
    rest_parents = np.where(is_shared, number[first, 0], -1)
    return np.stack([np.full(len(first), -1), rest_parents], axis=1)


def _prompt_and_needed_tokens(
    batch: Batch, starts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how many tokens of each sequence lie before the first of the mask, and before the
    last; both are 0 for a sequence without any.
    """
    scored = np.flatnonzero(batch.mask)
    begin, end = np.searchsorted(scored, starts), np.searchsorted(scored, starts + batch.lengths)
    has_any = begin < end
    prompts, needed = np.zeros(len(starts), np.int64), np.zeros(len(starts), np.int64)
    prompts[has_any] = scored[begin[has_any]] - starts[has_any]
    needed[has_any] = scored[end[has_any] - 1] - starts[has_any]
    return prompts, needed


def _first_with_same_prompt(
    batch: Batch, starts: NDArray[np.int64], prompts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the first sequence with the prompt of each, and whether several have that prompt."""
    first_with: dict[bytes, int] = {}
    first = np.arange(len(starts))
    for number in np.flatnonzero(prompts).tolist():
        prompt = batch.tokens[starts[number] : starts[number] + prompts[number]]
        first[number] = first_with.setdefault(prompt.tobytes(), number)
    return first, np.bincount(first)[first] > 1
