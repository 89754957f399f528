"""Records of a .csv file with a header row. All fields are text."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spmd_rl.data.files.record import DataRecord
from spmd_rl.errors import DataError


def read_csv(file: Path, content: bytes) -> list[DataRecord | DataError]:
    """Return the rows below the header, each with the line on which it begins.

    Fields in double quotes may hold commas, newlines and doubled quotes. Blank lines are skipped.
    An error stands in place of a row that has not the header's fields.
    Raises: DataError for a quote that never ends, and for text that is not UTF-8.
    """
    rows = _rows(file, content)
    _, names = next(rows, (0, []))
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{file}:1", f"two columns are called {twice[0]!r}")
    if len(names) == 1 and (found := next((c for c in ";\t|" if c in names[0]), None)):
        problem = (
            f"the header is one column, {names[0]!r}: separate fields by commas, not {found!r}"
        )
        raise DataError(f"{file}:1", problem)
    records: list[DataRecord | DataError] = []
    for line, row in rows:
        where = f"{file}:{line}"
        if len(row) == len(names):
            records.append(DataRecord(where, dict(zip(names, row, strict=True))))
        else:
            problem = f"expected {len(names)} fields, as the header has, got {len(row)}"
            records.append(DataError(where, problem))
    return records


def _rows(file: Path, content: bytes) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows that are not blank, each with its first line in the file, from 1."""
    reader = csv.reader(_lines(file, content), strict=True)
    with _long_fields():
        while True:
            line = reader.line_num + 1
            try:
                row = next(reader, None)
            except csv.Error as error:
                raise DataError(f"{file}:{line}", f"not valid CSV: {error}") from error
            if row is None:
                return
            if row:
                yield line, row


def _lines(file: Path, content: bytes) -> Iterator[str]:
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{file}:{number}", f"not UTF-8 at byte {error.start + 1}") from error


@contextmanager
def _long_fields() -> Iterator[None]:
    """Lift the limit on the length of a field, which is one for the whole process."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)
