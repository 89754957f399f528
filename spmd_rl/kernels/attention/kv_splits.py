"""Splits of keys of a fixed size: which tokens meet which keys, and where the results lie.

A sequence's keys are cut every `size` tokens, counted from its start. A token attends to each split
that it sees on its own, and `merge_states` merges the results. So the decoding of a few long
sequences keeps a whole GPU busy. The trainer cuts at the same places and has the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spmd_rl.kernels.runtime.ragged import offsets_within


@dataclass(frozen=True)
class KvSplits:
    """Runs of new tokens, and pairs of a run with each earlier split of its sequence.

    A run lies within one split. Results come in this order: all tokens over their own splits, the
    padding, the pairs run by run.
    Shape: `sequence`, `split`, `lengths`, `num_keys` [R] hold each run's sequence and split, its
    number of tokens, and its split's keys up to the run's end. `pair_run`, `pair_split` [E] hold
    the pairs. `queries` [Q] holds the token of each row of the pairs. `rows` [T', N] int32 holds
    where each token's results lie by split, and -1 for splits that it does not see.
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
    ) -> KvSplits:
        """Cut `lengths` [B] new tokens after `starts` [B] old ones.

        Behind them come `padding` tokens, which see only themselves.
        """
        ends = starts + lengths
        counts = (ends - 1) // size - starts // size + 1
        sequence = np.repeat(np.arange(len(starts)), counts)
        split = np.repeat(starts // size, counts) + offsets_within(counts)
        run_ends = np.minimum((split + 1) * size, ends[sequence])
        run_lengths = run_ends - np.maximum(split * size, starts[sequence])
        pair_run, pair_split = np.repeat(np.arange(len(split)), split), offsets_within(split)
        pair_lengths = run_lengths[pair_run]
        queries = np.repeat(
            (np.cumsum(run_lengths) - run_lengths)[pair_run], pair_lengths
        ) + offsets_within(pair_lengths)
        own = np.arange(lengths.sum() + padding)
        rows = np.full((len(own), split.max() + 1), -1, dtype=np.int32)
        rows[own, np.pad(np.repeat(split, run_lengths), (0, padding))] = own
        rows[queries, np.repeat(pair_split, pair_lengths)] = len(own) + np.arange(len(queries))
        return KvSplits(
            sequence,
            split,
            run_lengths,
            run_ends - split * size,
            pair_run,
            pair_split,
            queries,
            rows,
        )
