"""Order of the draws from a data set: a pure function of seed, epoch and draw."""

from __future__ import annotations

import random
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_KEPT = 2  # orders of epochs: prompts that are given back may be those of the epoch before


class EpochOrder:
    """Endless draws from `num_records` records, every record once an epoch.

    The order of an epoch depends only on the seed, the epoch and the number of records. It is the
    same on every machine and Python version. `num_drawn` is the whole state.
    """

    def __init__(self, num_records: int, *, seed: int | str, shuffle: bool) -> None:
        self.num_records = num_records
        self.num_drawn = 0
        self._seed = seed
        self._shuffle = shuffle
        self._order = lru_cache(_KEPT)(self._shuffled)  # by epoch

    def next(self) -> int:
        """Return the index of the record that the next draw takes."""
        self.num_drawn += 1
        return self.index_of(self.num_drawn - 1)

    def index_of(self, draw: int) -> int:
        """Return the index of the record that a draw takes; draws are counted from 0."""
        epoch, position = divmod(draw, self.num_records)
        if not self._shuffle:
            return position
        return int(self._order(epoch)[position])

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        # Python keeps Random(text).random() the same in all versions, but not shuffle(). From the
        # same state numpy draws the same numbers, in less time and memory.
        _, state, _ = random.Random(f"{self._seed}/{epoch}").getstate()
        stream = np.random.RandomState()
        stream.set_state(("MT19937", np.array(state[:-1], np.uint32), state[-1], 0, 0.0))
        return np.argsort(stream.random_sample(self.num_records), kind="stable")
