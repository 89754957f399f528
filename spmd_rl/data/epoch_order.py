"""Which record each draw takes: a pure function of (seed, epoch, draw), so that a cursor is one
number.
"""

from __future__ import annotations

import random


class EpochOrder:
    """Endless draws from `num_records` records, every record once an epoch.

    The order of an epoch depends on (seed, epoch) and the number of records alone, on every machine
    and Python version. `drawn` is the whole state.
    """

    def __init__(self, num_records: int, *, seed: int, shuffle: bool) -> None:
        self.num_records = num_records
        self.drawn = 0
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._indices: list[int] = []

    def next(self) -> int:
        """Index of the record of this draw."""
        epoch, position = divmod(self.drawn, self.num_records)
        if epoch != self._epoch:
            self._epoch, self._indices = epoch, self._of_epoch(epoch)
        self.drawn += 1
        return self._indices[position]

    def _of_epoch(self, epoch: int) -> list[int]:
        indices = list(range(self.num_records))
        if self._shuffle:
            # Random(text).random() is what Python promises to keep from version to version;
            # shuffle() is not
            stream = random.Random(f"{self._seed}/{epoch}")
            keys = [stream.random() for _ in indices]
            indices.sort(key=keys.__getitem__)
        return indices
