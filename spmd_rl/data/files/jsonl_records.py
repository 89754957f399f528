"""Records of a .jsonl file that may be larger than memory: an index of its lines, read on demand.

The file is not mapped into memory, because a mapped file that another program cuts ends the process
with a signal.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.files.record import DataRecord, Records, short
from spmd_rl.errors import DataError
from spmd_rl.observe.jsonl import parse_json


class JsonLines(Records):
    """The lines of a .jsonl file that are not blank. The file must stay as it is.

    Raises: DataError for a file that is one list.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        with file.open("rb") as content:
            self._starts, self._stops, self._numbers = index_lines(content)
            content.seek(self._starts[0] if len(self) else 0)
            if content.read(1) == b"[":
                problem = "expected a JSON object a line; a file that is one list is called .json"
                raise DataError(str(file), problem)
            self.num_bytes = os.fstat(content.fileno()).st_size

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, numbers: Sequence[int]) -> list[DataRecord]:
        """Return these records. Raises: DataError for a malformed line."""
        with self._file.open("rb") as content:
            return [self._record(content.fileno(), number) for number in numbers]

    def _record(self, descriptor: int, number: int) -> DataRecord:
        start, stop = int(self._starts[number]), int(self._stops[number])
        where = f"{self._file}:{self._numbers[number]}"
        row = parse_json(where, os.pread(descriptor, stop - start, start).removesuffix(b"\n"))
        if not isinstance(row, dict):
            raise DataError(where, f"expected a JSON object, got {short(row)}")
        return DataRecord(where, row)

    def digest(self) -> str:
        """Return a digest of the file's bytes."""
        with self._file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()


def index_lines(
    content: BufferedReader,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return where lines that are not blank begin and end, and their numbers from 1.

    Only a newline ends a line, and is its last byte.
    Shape: all are [N].
    """
    sizes = np.fromiter((-len(line) if line.isspace() else len(line) for line in content), np.int64)
    stops, keep = np.cumsum(np.abs(sizes)), sizes > 0
    starts = stops[keep] - sizes[keep]
    return starts, stops[keep], np.flatnonzero(keep) + 1
