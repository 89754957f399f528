"""Conversion of a file of conversations, record by record, with a list of what was refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from spmd_rl.config.likely import did_you_mean_path
from spmd_rl.data.files.files import open_records
from spmd_rl.data.files.record import DataRecord
from spmd_rl.data.logs.form import Json
from spmd_rl.data.logs.formats import FORMATS, READ, deduce, export_row, import_row
from spmd_rl.errors import ConfigError, DataError
from spmd_rl.observe.atomic_write import atomic_file
from spmd_rl.observe.jsonl import numbered_lines, parse_finite_json

_DEDUCED_FROM = 100  # records


class Reject(NamedTuple):
    """A record that was refused. `line` counts from 1; it is a record's number in other files."""

    line: int
    reason: str


class Converted(NamedTuple):
    """Result of a conversion; `source` is the format that was read."""

    source: str
    num_records: int
    rejects: list[Reject]


def read_rows(path: Path) -> Iterator[tuple[int, Json | DataError]]:
    """Yield the rows of a file with their lines, and the error in place of a broken row.

    A .jsonl file is read line by line. Any other file must be sound as a whole.
    Raises: DataError, ConfigError for a file that cannot be read at all.
    """
    if not path.exists():
        raise DataError(str(path), f"no such file{did_you_mean_path(path)}")
    if path.suffix == ".jsonl":
        for number, line in numbered_lines(path):
            yield number, _row(f"{path}:{number}", line)
    else:
        for number, record in enumerate(open_records(str(path)).each(), start=1):
            yield number, record.row if isinstance(record, DataRecord) else record


def _row(where: str, line: bytes) -> Json | DataError:
    def refuse(text: str) -> None:
        raise DataError(where, f"not valid JSON: {text[:20]} is no number that JSON has")

    try:
        row = parse_finite_json(where, line, refuse)
    except DataError as error:
        return error
    kind = type(row).__name__
    return row if isinstance(row, dict) else DataError(where, f"expected an object, got {kind}")


def convert(
    source: Path, target: Path, read: str | None, write: str, *, force: bool = False
) -> Converted:
    """Convert a file from the format `read` to the format `write`; None deduces the format.

    The target is complete or does not exist. It is not written when every record was refused.
    Raises: ConfigError (a target that exists, an unclear format), DataError (an unreadable file).
    """
    if target.suffix != ".jsonl":
        raise ConfigError(f"{target}: the file to write ends in .jsonl")
    if target.exists() and (not force or target.resolve() == source.resolve()):
        raise ConfigError(f"{target} exists: name another file, or replace it with --force")
    read = read or _deduce(source)
    for name, known in ((read, READ), (write, tuple(FORMATS))):
        if name not in known:
            raise ConfigError(f"no format {name!r}: there are {', '.join(known)}")
    num_records, rejects = 0, list[Reject]()
    try:
        with atomic_file(target) as file:
            for number, row in read_rows(source):
                num_records += 1
                try:
                    made = _converted(f"{source}:{number}", row, read, write)
                except DataError as error:
                    rejects.append(Reject(number, str(error)))
                    continue
                file.write(json.dumps(made).encode() + b"\n")
            if len(rejects) == num_records:
                raise _NothingWritten
    except _NothingWritten:
        pass
    return Converted(read, num_records, rejects)


class _NothingWritten(Exception):
    """Leaves the file that would have no record unwritten."""


def _converted(where: str, row: Json | DataError, read: str, write: str) -> Json:
    """Return a converted row. Raises: DataError with file, line and field."""
    if isinstance(row, DataError):
        raise row
    try:
        return export_row(import_row(row, read), write)
    except RecursionError as error:
        raise DataError(where, "nested too deeply") from error
    except DataError as error:
        raise DataError(where, str(error).lstrip(".: ")) from error


def _deduce(source: Path) -> str:
    """Return the format of the first sound rows. Raises: ConfigError when it is not clear."""
    first = [row for _, row in islice(read_rows(source), _DEDUCED_FROM)]
    try:
        return deduce([row for row in first if isinstance(row, dict)])
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def write_rejects(path: Path, rejects: list[Reject]) -> None:
    """Write a line of JSON for every reject, with `line` and `reason`."""
    with atomic_file(path) as file:
        file.writelines(json.dumps(item._asdict()).encode() + b"\n" for item in rejects)
