"""Records of files that must not change while a run reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from spmd_rl.data.files.record import DataRecord, Records
from spmd_rl.errors import DataError


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
