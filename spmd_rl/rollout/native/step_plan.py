"""The plan of one engine step, as a value, and the rule that shares its token budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class StepPlan:
    """One step: row `rows[b]` computes its tokens `starts[b] : starts[b] + lengths[b]`.

    A row of length 0 is a fork: the row before it has the same tokens and computes the last one for
    both. `copies_before` and `copies_after` hold pairs (source page, target page), which are copied
    before and after the step.
    Shape: rows, starts and lengths [B].
    """

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    copies_before: Sequence[tuple[int, int]] = ()
    copies_after: Sequence[tuple[int, int]] = ()


def share_budget(missing: NDArray[np.int64], budget: int) -> NDArray[np.int64]:
    """Return how many of each row's `missing` tokens a budget of tokens covers.

    Rows that miss one token go first, then the others in order.
    Shape: `missing` [B], at least 1 each, with at most `budget` rows that miss one; returns [B].
    """
    decoding = missing == 1
    prefill = np.where(decoding, 0, missing)
    prefill_budget = budget - int(decoding.sum())
    earlier = np.cumsum(prefill) - prefill
    chunks = np.clip(prefill_budget - earlier, 0, prefill)
    return np.where(decoding, 1, chunks)
