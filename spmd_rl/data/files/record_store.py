"""What is prepared of the records of one data file: held in memory, or made when asked for.

Of a small file, everything is tokenised at the start, so that every mistake in it is found there.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np

from spmd_rl.data.files.record import DataRecord, Records
from spmd_rl.errors import DataError

T = TypeVar("T")

# A file with more bytes or records is large: its records are read when they are drawn.
SMALL_BYTES, SMALL_RECORDS = 1 << 24, 100_000
FIRST = 1000  # records of a large file that are prepared at the start


class Preparer(ABC, Generic[T]):
    """Makes what a run draws: prompts, sequences to learn, preference pairs or documents.

    `noun` names them in messages, and `defect` says what is wrong with those that are left out.
    `answer_keys` are the keys of a record's answers.
    """

    noun: str
    defect: str = ""
    answer_keys: Sequence[str] = ()

    @abstractmethod
    def make(self, records: Sequence[DataRecord], source: str) -> list[T | None]:
        """Return one for each record of the source; None for a record that is left out.

        Raises: DataError or ConfigError, which names the first thing to correct.
        """

    @abstractmethod
    def encoded(self, prepared: T) -> bytes:
        """Return all that a run may use of it, for a digest that tells whether the data changed."""

    def notes(self) -> list[str]:
        """Return sentences on what a user may not expect of all that was made so far."""
        return []

    def report(self, records: Sequence[DataRecord], prepared: Sequence[T]) -> list[str]:
        """Return sentences on the records of a run's start, such as that answers are numbers."""
        found = []
        for key in self.answer_keys:
            if numbers := [record for record in records if record.has_number(key)]:
                found.append(
                    f"{len(numbers)} of {len(records)} answers are numbers: "
                    f"they are used as text, such as {numbers[0].text_or_number(key)!r}"
                )
        return found


class RecordStore(Generic[T]):
    """What is prepared of a file's records, by numbers. `first` is what is prepared at the start.

    That is all of a small file, which is held, and the first records of a large one.
    Raises: DataError or ConfigError, which names the first thing to correct.
    """

    def __init__(self, path: str, records: Records, preparer: Preparer[T], source: str) -> None:
        self._path, self._preparer, self._source = path, preparer, source
        is_small = records.num_bytes <= SMALL_BYTES and len(records) <= SMALL_RECORDS
        self._is_dropped = np.zeros(len(records), np.bool_)
        first = records.read(range(len(records))[: None if is_small else FIRST])
        prepared = preparer.make(first, source)
        self.first = [item for item in prepared if item is not None]
        self._say(*preparer.report(first, self.first), *preparer.notes())
        self._records = None if is_small else records
        if is_small and len(self.first) < len(records):
            self._drop([number for number, item in enumerate(prepared) if item is None])
            of_all = f"{self.num_dropped} of {len(records)} {preparer.noun}"
            self._say(f"dropped {of_all}, which {preparer.defect}")

    def __len__(self) -> int:
        return len(self.first if self._records is None else self._records)

    def get(self, numbers: Sequence[int]) -> list[T | None]:
        """Return these. None stands for one of a large file that is left out.

        Raises: DataError for a record that is malformed, and when all are left out.
        """
        if self._records is None:
            return [self.first[number] for number in numbers]
        prepared = self._preparer.make(self._records.read(numbers), self._source)
        dropped = [n for n, item in zip(numbers, prepared, strict=True) if item is None]
        if dropped:
            if not self.num_dropped:
                noun, defect = self._preparer.noun, self._preparer.defect
                self._say(f"{noun} that {defect} are dropped when drawn")
            self._drop(dropped)
        return prepared

    @property
    def num_dropped(self) -> int:
        """How many records were left out so far."""
        return int(np.count_nonzero(self._is_dropped))

    @cached_property
    def digest(self) -> str:
        """Digest of all that was prepared at the start, and of a large file.

        A corrected answer changes it, and so does another tokenizer.
        """
        digest = hashlib.sha256()
        for item in self.first:
            digest.update(self._preparer.encoded(item))
        if self._records is None:
            return digest.hexdigest()
        return hashlib.sha256(f"{self._records.digest()} {digest.hexdigest()}".encode()).hexdigest()

    def _drop(self, numbers: Sequence[int]) -> None:
        self._is_dropped[numbers] = True
        if self._is_dropped.all():
            noun, defect = self._preparer.noun, self._preparer.defect
            raise DataError(self._path, f"all {len(self._is_dropped)} {noun} {defect}")

    def _say(self, *sentences: str) -> None:
        for sentence in sentences:
            print(f"{self._path}: {sentence}", flush=True)
