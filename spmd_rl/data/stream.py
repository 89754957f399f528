"""Stream of prepared records: an endless sequence of draws that a checkpoint resumes exactly."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.epoch_order import EpochOrder
from spmd_rl.errors import DataError

T = TypeVar("T")

DATA_CHANGED = (
    "not those of the checkpoint: restore the data file, or start a new run with --run.name"
)


class RecordStream(ABC, Generic[T]):
    """An endless stream of records, every one of them once an epoch.

    `source` is the file, and `noun` names the records; both are for messages. A subclass says by
    `_arrays` which arrays make up a record: their digest tells whether the data has changed.
    """

    def __init__(
        self, source: str, noun: str, records: Sequence[T], *, seed: int, shuffle: bool
    ) -> None:
        self._source = source
        self._noun = noun
        self._records = records
        self._order = EpochOrder(len(records), seed=seed, shuffle=shuffle)

    def __len__(self) -> int:
        return len(self._records)

    def draw(self, num_records: int) -> list[T]:
        """Return the next records, across the end of an epoch if need be."""
        return [self._records[self._order.next()] for _ in range(num_records)]

    def skip(self, num_records: int) -> None:
        """Go on as after `draw(num_records)`."""
        self._order.num_drawn += num_records

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as plain data."""
        return {"drawn": self._order.num_drawn, "digest": self._digest}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the draw at which `state` was taken.

        Raises: DataError when the data is not the same.
        """
        if state.get("digest") != self._digest:
            raise DataError(self._source, f"the {self._noun} are {DATA_CHANGED}")
        self._order.num_drawn = state["drawn"]

    @abstractmethod
    def _arrays(self, record: T) -> Iterable[NDArray[np.generic]]:
        """Return all arrays of a record."""

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        for record in self._records:
            for array in self._arrays(record):
                digest.update(array.size.to_bytes(8, "little") + array.tobytes())
        return digest.hexdigest()
