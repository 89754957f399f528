"""Prepared records of one data file by their numbers: all held in memory, or read when asked for.

Of a small file, everything is tokenised at the start, so that every mistake in it is found there.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np

from spmd_rl.data.files.record import Records
from spmd_rl.data.preparer import Preparer
from spmd_rl.errors import DataError

T = TypeVar("T")

# A file with more bytes or records is large: its records are read when they are drawn.
SMALL_BYTES, SMALL_RECORDS = 1 << 24, 100_000
FIRST = 1000  # records of a large file that are prepared at the start


class RecordStore(ABC, Generic[T]):
    """What is prepared of a file's records, by numbers. `num_dropped` counts what was left out.

    `first` is what was prepared at the start.
    """

    first: Sequence[T]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def get(self, numbers: Sequence[int]) -> list[T | None]:
        """Return these. None stands for one that is left out."""

    @property
    @abstractmethod
    def num_dropped(self) -> int: ...

    @property
    @abstractmethod
    def digest(self) -> str: ...


def open_store(path: str, records: Records, preparer: Preparer[T], source: str) -> RecordStore[T]:
    """Prepare all records of a file, or the first ones of a large file.

    Raises: DataError or ConfigError, which names the first thing to correct.
    """
    is_small = records.num_bytes <= SMALL_BYTES and len(records) <= SMALL_RECORDS
    first = records.read(range(len(records))[: None if is_small else FIRST])
    prepared = preparer.make(first, source)
    kept = [one for one in prepared if one is not None]
    preparer.report(path, first, kept)
    for note in preparer.notes():
        print(f"{path}: {note}", flush=True)
    if is_small:
        return HeldRecords(path, preparer, kept, len(records))
    return ReadRecords(path, preparer, kept, records, source)


class HeldRecords(RecordStore[T]):
    """What is all in memory. Of `num_records`, those that are not `kept` were left out."""

    def __init__(
        self, path: str, preparer: Preparer[T], kept: Sequence[T], num_records: int
    ) -> None:
        self.first = kept
        self._preparer = preparer
        self._num_dropped = num_records - len(kept)
        if not kept:
            raise _all_dropped(path, preparer, num_records)
        if self._num_dropped:
            print(
                f"{path}: dropped {self._num_dropped} of {num_records} {preparer.noun}, "
                f"which {preparer.defect}",
                flush=True,
            )

    def __len__(self) -> int:
        return len(self.first)

    def get(self, numbers: Sequence[int]) -> list[T | None]:
        """Return these."""
        return [self.first[number] for number in numbers]

    @property
    def num_dropped(self) -> int:
        """How many records of the file are left out."""
        return self._num_dropped

    @cached_property
    def digest(self) -> str:
        """Digest of all that was prepared: a corrected answer, for one, changes it."""
        return _digest(self._preparer, self.first)


class ReadRecords(RecordStore[T]):
    """What is read and prepared when it is asked for. `first` is of the first records."""

    def __init__(
        self,
        path: str,
        preparer: Preparer[T],
        first: Sequence[T],
        records: Records,
        source: str,
    ) -> None:
        self.first = first
        self._path, self._preparer, self._records, self._source = path, preparer, records, source
        self._is_dropped = np.zeros(len(records), np.bool_)

    def __len__(self) -> int:
        return len(self._records)

    def get(self, numbers: Sequence[int]) -> list[T | None]:
        """Return these. None stands for one that is left out.

        Raises: DataError for a record that is malformed, and when all are left out.
        """
        prepared = self._preparer.make(self._records.read(numbers), self._source)
        dropped = [n for n, one in zip(numbers, prepared, strict=True) if one is None]
        if dropped:
            self._note_dropped(dropped)
        return prepared

    @property
    def num_dropped(self) -> int:
        """How many records were left out so far."""
        return int(np.count_nonzero(self._is_dropped))

    @cached_property
    def digest(self) -> str:
        """Digest of the file, and of what was prepared first: that changes with the tokenizer."""
        of_first = _digest(self._preparer, self.first)
        return hashlib.sha256(f"{self._records.digest()} {of_first}".encode()).hexdigest()

    def _note_dropped(self, numbers: Sequence[int]) -> None:
        if not self.num_dropped:
            noun, defect = self._preparer.noun, self._preparer.defect
            print(f"{self._path}: {noun} that {defect} are dropped when drawn", flush=True)
        self._is_dropped[numbers] = True
        if self._is_dropped.all():
            raise _all_dropped(self._path, self._preparer, len(self))


def _all_dropped(path: str, preparer: Preparer[T], num_records: int) -> DataError:
    return DataError(path, f"all {num_records} {preparer.noun} {preparer.defect}")


def _digest(preparer: Preparer[T], prepared: Iterable[T]) -> str:
    digest = hashlib.sha256()
    for one in prepared:
        digest.update(preparer.encoded(one))
    return digest.hexdigest()
