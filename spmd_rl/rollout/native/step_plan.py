"""The plan of one engine step, as a value."""

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
    before and after the step. So do `states_before` (slot, row) and `states_after` (row, slot), of
    slots of the states that layers hand on; a row's own slot has its number.
    Shape: rows, starts and lengths [B].
    """

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    copies_before: Sequence[tuple[int, int]] = ()
    copies_after: Sequence[tuple[int, int]] = ()
    states_before: Sequence[tuple[int, int]] = ()
    states_after: Sequence[tuple[int, int]] = ()
