"""Order of the draws from a data set: a pure function of seed, epoch and draw."""

from __future__ import annotations

import random


class EpochOrder:
    """Endless draws from `num_records` records, every record once an epoch.

    The order of an epoch depends only on the seed, the epoch and the number of records. It is the
    same on every machine and Python version. `num_drawn` is the whole state.
    """

    def __init__(self, num_records: int, *, seed: int, shuffle: bool) -> None:
        self.num_records = num_records
        self.num_drawn = 0
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._indices: list[int] = []

    def next(self) -> int:
        """Return the index of the record that the next draw takes."""
        self.num_drawn += 1
        return self.index_of(self.num_drawn - 1)

    def index_of(self, draw: int) -> int:
        """Return the index of the record that a draw takes; draws are counted from 0."""
        epoch, position = divmod(draw, self.num_records)
        if epoch != self._epoch:
            self._epoch, self._indices = epoch, self._epoch_indices(epoch)
        return self._indices[position]

    def _epoch_indices(self, epoch: int) -> list[int]:
        indices = list(range(self.num_records))
        if self._shuffle:
            # Python keeps Random(text).random() the same in all versions, but not shuffle()
            stream = random.Random(f"{self._seed}/{epoch}")
            keys = [stream.random() for _ in indices]
            indices.sort(key=keys.__getitem__)
        return indices
