"""Attention in splits of a fixed size: which tokens meet which keys in one call, and where their
results lie.

A sequence's keys are cut every `size` tokens, from its start. A token attends to each split that it
sees apart from the others; `merge_ranges` makes one result of them. So a few long sequences are
work for a whole GPU when they are decoded, and the trainer, cutting at the same places, has the
same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Splits:
    """New tokens in runs, each within one split of its sequence, and pairs of a run and a split
    before its own.

    The results of all tokens over their own splits come first, then padding's, then the pairs', run
    by run.
    Shape: `sequence`, `split`, `lengths`, `num_keys` [R]: a run's sequence and split, its tokens,
    and its split's keys up to its end; `pair_run`, `pair_split` [E]; `queries` [Q], the token of
    each row of the pairs; `rows` [T', N] int32, where the results of each token lie by split, -1
    for splits that it does not see.
    """

    sequence: NDArray[np.int64]
    split: NDArray[np.int64]
    lengths: NDArray[np.int64]
    num_keys: NDArray[np.int64]
    pair_run: NDArray[np.int64]
    pair_split: NDArray[np.int64]
    queries: NDArray[np.int64]
    rows: NDArray[np.int32]

    @property
    def pair_lengths(self) -> NDArray[np.int64]:
        return self.lengths[self.pair_run]

    @staticmethod
    def of(
        starts: NDArray[np.int64], lengths: NDArray[np.int64], size: int, padding: int = 0
    ) -> Splits:
        """`lengths` [B] new tokens after `starts` [B] old ones, then `padding` tokens that see only
        themselves.
        """
        ends = starts + lengths
        counts = (ends - 1) // size - starts // size + 1
        sequence = np.repeat(np.arange(len(starts)), counts)
        split = np.repeat(starts // size, counts) + ranges(counts)
        run_ends = np.minimum((split + 1) * size, ends[sequence])
        run_lengths = run_ends - np.maximum(split * size, starts[sequence])
        pair_run, pair_split = np.repeat(np.arange(len(split)), split), ranges(split)
        pair_lengths = run_lengths[pair_run]
        queries = np.repeat(
            (np.cumsum(run_lengths) - run_lengths)[pair_run], pair_lengths
        ) + ranges(pair_lengths)
        own = np.arange(lengths.sum() + padding)
        rows = np.full((len(own), split.max() + 1), -1, dtype=np.int32)
        rows[own, np.pad(np.repeat(split, run_lengths), (0, padding))] = own
        rows[queries, np.repeat(pair_split, pair_lengths)] = len(own) + np.arange(len(queries))
        return Splits(
            sequence,
            split,
            run_lengths,
            run_ends - split * size,
            pair_run,
            pair_split,
            queries,
            rows,
        )


def ranges(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """0 .. size - 1 of each size, end to end."""
    return np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
