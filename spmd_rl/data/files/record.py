"""One record of a data file, and the records of a whole file."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_rl.config.likely import did_you_mean
from spmd_rl.errors import DataError

_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can spell these, but UTF-8 cannot
NAMES_OF_KEYS = "; settings such as prompts.answer_key say which keys are read"
_CHUNK = 4096  # records that are read at once


@dataclass(frozen=True)
class DataRecord:
    """One row of a data file, and `where` it stands (`file:line`).

    A key names a field. Where the row has no such field, "a.b" is the field "b" of the object "a".
    """

    where: str
    row: dict[str, Any]

    def text(self, key: str, expected: str = "a string") -> str:
        """Return the string under `key`. Raises: DataError when absent or of another type."""
        value = self.value(key)
        if not isinstance(value, str):
            raise DataError(f"{self.where}: {key}", f"expected {expected}, got {short(value)}")
        if not value.isascii() and _SURROGATE.search(value):
            raise DataError(f"{self.where}: {key}", "half of a surrogate pair is not text")
        return value

    def text_or_number(self, key: str) -> str:
        """Return the string or finite number under `key`, as text. Raises: DataError, as `text`."""
        if self.has_number(key):
            return str(self.get(key))
        return self.text(key, "a string or a finite number")

    def has_number(self, key: str) -> bool:
        """Whether a finite number is under `key`."""
        value = self.get(key)
        return math.isfinite(value) if isinstance(value, float) else type(value) is int

    def value(self, key: str) -> Any:
        """Return the value under `key`. Raises: DataError that lists the keys there are."""
        if not self.has(key):
            have = ", ".join(map(repr, self.key_names())) or "none"
            likely = did_you_mean(key, self.key_names()) or NAMES_OF_KEYS
            raise DataError(
                f"{self.where}: {key}", f"no such key in this record (it has {have}){likely}"
            )
        return self.get(key)

    def key_names(self) -> Iterator[str]:
        """Yield the keys of the row, and of the objects in it."""
        for key, value in self.row.items():
            yield key
            if isinstance(value, dict):
                yield from (f"{key}.{inner}" for inner in value)

    def has(self, key: str) -> bool:
        """Whether there is a field of this name."""
        return _holder(self.row, key) is not None

    def get(self, key: str) -> Any:
        """Return the value under `key`, or None where there is none."""
        found = _holder(self.row, key)
        return found[0][found[1]] if found else None


class Records(ABC):
    """The records of a file, by their numbers from 0. They are read when they are asked for.

    `num_bytes` is about how much data they are.
    """

    num_bytes: int

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, numbers: Sequence[int]) -> list[DataRecord]:
        """Return these records. Raises: DataError for one that is malformed."""

    @abstractmethod
    def digest(self) -> str:
        """Return a digest of the file's bytes. It reads the whole file."""

    def chunks(self, num_records: int) -> Iterator[list[DataRecord]]:
        """Yield the first `num_records` records in lists that fit into memory."""
        for start in range(0, num_records, _CHUNK):
            yield self.read(range(start, min(start + _CHUNK, num_records)))

    def each(self) -> Iterator[DataRecord | DataError]:
        """Yield every record, and the error in place of one that is malformed."""
        for start in range(0, len(self), _CHUNK):
            numbers = range(start, min(start + _CHUNK, len(self)))
            try:
                yield from self.read(numbers)
            except DataError:
                yield from (self._record_or_error(number) for number in numbers)

    def _record_or_error(self, number: int) -> DataRecord | DataError:
        try:
            (record,) = self.read([number])
        except DataError as error:
            return error
        return record

    def num_within(self, num_bytes: int) -> int:
        """Return about how many of the first records make up `num_bytes`; at most all, at least 1.

        All of them are counted exactly.
        """
        if self.num_bytes <= num_bytes:
            return len(self)
        return max(1, len(self) * num_bytes // self.num_bytes)


class ListedRecords(Records):
    """Records that are all in memory, with the error in place of one that is malformed.

    `digest` is that of their file.
    """

    def __init__(
        self, records: Iterable[DataRecord | DataError], num_bytes: int, digest: str
    ) -> None:
        self._records = list(records)
        self._digest = digest
        self.num_bytes = num_bytes

    def __len__(self) -> int:
        return len(self._records)

    def read(self, numbers: Sequence[int]) -> list[DataRecord]:
        """Return these records. Raises: DataError for one that is malformed."""
        return [_sound(self._records[number]) for number in numbers]

    def digest(self) -> str:
        """Return the digest of the file."""
        return self._digest


class SlicedRecords(Records):
    """Some records of a file, which follow each other."""

    def __init__(self, records: Records, wanted: range) -> None:
        self._records = records
        self._wanted = wanted
        self.num_bytes = records.num_bytes * len(wanted) // len(records)

    def __len__(self) -> int:
        return len(self._wanted)

    def read(self, numbers: Sequence[int]) -> list[DataRecord]:
        """Return these records. Raises: DataError for one that is malformed."""
        return self._records.read([self._wanted[number] for number in numbers])

    def digest(self) -> str:
        """Return the digest of the file, with the records that the slice has."""
        return f"{self._records.digest()}[{self._wanted.start}:{self._wanted.stop}]"


def _holder(row: dict[str, Any], key: str) -> tuple[dict[str, Any], str] | None:
    """Return the object that has a field, and its name in there; None where there is none."""
    while key not in row:
        name, dot, key = key.partition(".")
        inner = row.get(name)
        if not dot or not isinstance(inner, dict):
            return None
        row = inner
    return row, key


def _sound(record: DataRecord | DataError) -> DataRecord:
    if isinstance(record, DataError):
        raise record
    return record


def short(value: Any) -> str:
    """Return a value's text, of at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class WatchedRecords(Records):
    """The records that `open_them` opens, which are refused once one of their files has changed.

    A file that is written again may hold other records, or the same in another order. So nothing
    that was opened before is used any more, even where it is still in memory.
    """

    def __init__(self, files: Sequence[Path], open_them: Callable[[], Records]) -> None:
        self._states = {file: _state(file) for file in files}
        self._records = open_them()
        self._require_same()
        self.num_bytes = self._records.num_bytes

    def __len__(self) -> int:
        return len(self._records)

    def read(self, numbers: Sequence[int]) -> list[DataRecord]:
        """Return these records.

        Raises: DataError for one that is malformed, and when a file has changed.
        """
        self._require_same()
        try:
            return self._records.read(numbers)
        finally:
            self._require_same()

    def digest(self) -> str:
        """Return the digest of the files' bytes. Raises: DataError when a file has changed."""
        self._require_same()
        digest = self._records.digest()
        self._require_same()
        return digest

    def _require_same(self) -> None:
        for file, state in self._states.items():
            if _state(file) != state:
                problem = "the file has changed since the run opened it: restore it"
                raise DataError(str(file), problem)


def _state(file: Path) -> tuple[int, int]:
    """Return what changes with a file: its size and its time."""
    try:
        status = file.stat()
    except OSError as error:
        raise DataError(str(file), f"the file cannot be read: {error}") from error
    return status.st_size, status.st_mtime_ns
