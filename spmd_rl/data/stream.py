"""Stream of prepared records: an endless sequence of draws that a checkpoint resumes exactly."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.files.files import open_records
from spmd_rl.data.files.record import Records
from spmd_rl.data.files.record_store import Preparer, RecordStore
from spmd_rl.data.mixture import Mixture, Pick, data_weights, source_names
from spmd_rl.errors import DataError

T = TypeVar("T")

DATA_CHANGED = (
    "not those of the checkpoint: restore the data file, or start a new run with --run.name"
)
_KEPT = 2  # orders of epochs: prompts that are given back may be those of the epoch before


class RecordStream(Generic[T]):
    """An endless stream of what a `Preparer` makes of a data file, or of a slice of one.

    `data` may also be a mixture: paths with weights. The source of each draw follows from the
    seed and the number of the draw, and every source has an order of its own, in which each record
    comes once an epoch. `pick(step, names)` returns other weights for each step of `per_step`
    draws.

    `len()` is the number of records of an epoch; `num_dropped` counts those that were left out.
    Those of a large file are left out when they are drawn, and until then `len()` counts them.
    Raises: DataError (file, line, field) or ConfigError in the constructor. Later only for a large
    file, whose records are read when they are drawn, and for weights of `pick`.
    """

    def __init__(
        self,
        data: str | Mapping[str, float],
        preparer: Preparer[T],
        *,
        seed: int,
        shuffle: bool,
        pick: Pick | None = None,
        per_step: int = 1,
        open_file: Callable[[str], Records] = open_records,
    ) -> None:
        weights = data_weights(data)
        names = source_names([*weights])
        self.num_drawn = 0
        self._paths, self._preparer = [*weights], preparer
        self._stores = [
            RecordStore(path, open_file(path), preparer, name)
            for path, name in zip(weights, names, strict=True)
        ]
        by_name = dict(zip(names, weights.values(), strict=True))
        self._mixture = Mixture(by_name, seed=seed, pick=pick, per_step=per_step)
        seeds: list[int | str] = [seed]
        if len(names) > 1:
            seeds = [f"{seed}/{name}" for name in names]
        self._orders = [
            EpochOrder(len(store), seed=seed, shuffle=shuffle)
            for store, seed in zip(self._stores, seeds, strict=True)
        ]

    def __len__(self) -> int:
        return sum(map(len, self._stores))

    @property
    def num_dropped(self) -> int:
        """How many records were left out so far."""
        return sum(store.num_dropped for store in self._stores)

    def metrics(self) -> dict[str, float]:
        """Return how many records were left out so far, if any was."""
        return {"data/dropped": float(self.num_dropped)} if self.num_dropped else {}

    def draw(self, num_records: int) -> list[T]:
        """Return the next records, across the end of an epoch if need be."""
        return [one for _, one in self.numbered_draw(num_records)]

    def numbered_draw(self, num_records: int) -> list[tuple[int, T]]:
        """Return the next records, each with the number of its draw from 0."""
        found: list[tuple[int, T]] = []
        while num_left := num_records - len(found):
            first = self.num_drawn
            self.num_drawn += num_left
            found += self.drawn_at(range(first, self.num_drawn))
        return found

    def drawn_at(self, draws: Sequence[int]) -> list[tuple[int, T]]:
        """Return the records of these draws with their numbers, without those left out."""
        of_source: dict[int, dict[int, int]] = {}  # draw and number of the record, by source
        for draw, (source, place) in zip(draws, self._mixture.places(draws), strict=True):
            of_source.setdefault(source, {})[draw] = self._orders[source].index_of(place)
        found: dict[int, T | None] = {}
        for source, numbers in of_source.items():
            prepared = self._stores[source].get([*numbers.values()])
            found |= dict(zip(numbers, prepared, strict=True))
        return [(draw, one) for draw in draws if (one := found[draw]) is not None]

    def all(self) -> list[T]:
        """Return every record once, in the order of the files. They must fit into memory."""
        return [
            one for store in self._stores for one in store.get(range(len(store))) if one is not None
        ]

    def first(self) -> dict[str, Sequence[T]]:
        """Return what was prepared at the start, by path: all of a small file."""
        return {path: store.first for path, store in zip(self._paths, self._stores, strict=True)}

    def skip(self, num_records: int) -> None:
        """Go on as after `draw(num_records)`."""
        self.num_drawn += num_records

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as plain data: draws so far, and a digest of the data."""
        return {"drawn": self.num_drawn, "digest": self._digest}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the draw at which `state` was taken.

        Raises: DataError when the data is not the same.
        """
        if state.get("digest") != self._digest:
            raise self.changed()
        if type(state["drawn"]) is not int or state["drawn"] < 0:
            raise ValueError(f"'drawn' is {state['drawn']!r}")
        self.num_drawn = state["drawn"]

    def changed(self) -> DataError:
        """Return the error that says that the data is not that of a checkpoint."""
        return DataError(", ".join(self._paths), f"the {self._preparer.noun} are {DATA_CHANGED}")

    @cached_property
    def _digest(self) -> str:
        digests = [store.digest for store in self._stores]
        if len(digests) == 1:
            return digests[0]
        named = [" ".join(pair) for pair in zip(self._mixture.names, digests, strict=True)]
        return hashlib.sha256("\n".join(named).encode()).hexdigest()


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
