"""Records of a .jsonl file that may be larger than memory: an index of its lines, read on demand.

The file is read in pieces. It is not mapped into memory, because a mapped file that another program
cuts ends the process with a signal.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.files.record import DataRecord, Records, short
from spmd_rl.errors import DataError
from spmd_rl.observe.jsonl import parse_json

_PIECE = 1 << 23  # bytes that are read at once
_NEWLINE = 10
_BLANKS = np.frombuffer(b" \t\n\r\v\f", np.uint8)


class JsonLines(Records):
    """The lines of a .jsonl file that are not blank. The file must stay as it is.

    Raises: DataError for a file that is one list.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        with file.open("rb") as content:
            self._index = index_lines(content)
            content.seek(self._index.starts[0] if len(self) else 0)
            if content.read(1) == b"[":
                problem = "expected a JSON object a line; a file that is one list is called .json"
                raise DataError(str(file), problem)
            self.num_bytes = os.fstat(content.fileno()).st_size

    def __len__(self) -> int:
        return len(self._index.starts)

    def read(self, numbers: Sequence[int]) -> list[DataRecord]:
        """Return these records. Raises: DataError for a malformed line."""
        index = self._index
        with self._file.open("rb") as content:
            lines = [
                os.pread(content.fileno(), int(index.stops[n] - index.starts[n]), index.starts[n])
                for n in numbers
            ]
        return [
            json_record(f"{self._file}:{index.numbers[number]}", line)
            for number, line in zip(numbers, lines, strict=True)
        ]

    def digest(self) -> str:
        """Return a digest of the file's bytes."""
        with self._file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()


@dataclass(frozen=True)
class LineIndex:
    """Where lines begin and end in a file, and their numbers from 1. Shape: all are [N]."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    numbers: NDArray[np.int64]


def index_lines(content: BufferedReader) -> LineIndex:
    """Return the places of all lines that are not blank. Only a newline ends a line."""
    newlines, blanks, offset, at_start = [], [], 0, True
    while piece := content.read(_PIECE):
        found = np.frombuffer(piece, np.uint8)
        ends = np.flatnonzero(found == _NEWLINE)
        newlines.append(ends + offset)
        begins = np.concatenate([np.zeros(int(at_start), np.int64), ends + 1])
        at_start = bool(found[-1] == _NEWLINE)
        begins = begins[: len(begins) - at_start]  # the next piece has the first byte of that line
        blanks.append(begins[np.isin(found[begins], _BLANKS)] + offset)
        offset += len(piece)
    newlines.append(np.full(int(not at_start), offset))  # a last line without a newline
    stops = np.concatenate(newlines)
    starts = np.concatenate([np.zeros(min(1, len(stops)), np.int64), stops[:-1] + 1])
    keep = np.full(len(starts), True)
    for line in np.searchsorted(starts, np.concatenate([*blanks, np.zeros(0, np.int64)])):
        text = os.pread(content.fileno(), int(stops[line] - starts[line]), starts[line])
        keep[line] = bool(text.strip())
    return LineIndex(starts[keep], stops[keep], np.flatnonzero(keep) + 1)


def json_record(where: str, line: bytes) -> DataRecord:
    """Return the record of a line. Raises: DataError unless it is a JSON object."""
    row = parse_json(where, line)
    if not isinstance(row, dict):
        raise DataError(where, f"expected a JSON object, got {short(row)}")
    return DataRecord(where, row)
