"""What one step is to compute, and the counts that planning keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class StepPlan:
    """One step: row `rows[b]` computes its tokens `starts[b] : starts[b] + lengths[b]`.

    A row of length 0 forks: the row before it has the same tokens, and computes the last one for
    both. Page `copies[c][0]` is copied over page `copies[c][1]` before the step, and so are `forks`
    after it.
    Shape: rows, starts and lengths [B].
    """

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    copies: Sequence[tuple[int, int]] = ()
    forks: Sequence[tuple[int, int]] = ()


@dataclass
class Counters:
    """Totals since the engine was made. A backlog is what steps leave waiting: how many did, and
    their running rows.
    """

    num_submitted: int = 0
    num_admissions: int = 0
    num_preemptions: int = 0
    num_retractions: int = 0
    num_aborts: int = 0
    num_partial_chunks: int = 0
    num_lookup_tokens: int = 0
    num_hit_tokens: int = 0
    num_copied_tails: int = 0
    num_forks: int = 0
    num_scheduled_tokens: int = 0
    num_backlog_steps: int = 0
    num_backlog_rows: int = 0

    def add_backlog(self, num_rows: int) -> None:
        self.num_backlog_steps += 1
        self.num_backlog_rows += num_rows


def share_budget(missing: NDArray[np.int64], budget: int) -> NDArray[np.int64]:
    """How many of each row's `missing` tokens fit: rows that miss one first, then the others in
    order.

    Shape: `missing` [B], at least 1 each, with at most `budget` rows that miss one; returns [B].
    """
    decoding = missing == 1
    rest = np.where(decoding, 0, missing)
    left = budget - int(decoding.sum())
    chunks = np.clip(left - (np.cumsum(rest) - rest), 0, rest)
    return np.where(decoding, 1, chunks)
