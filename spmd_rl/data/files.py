"""Records of a JSONL or parquet file, each with its file and line for error messages.

`train.jsonl@[100:200]` means records 100 to 199. Negative numbers count from the end, as in Python.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_rl.errors import ConfigError, DataError
from spmd_rl.observe.jsonl import numbered_lines, parse_json

_SLICE = re.compile(r"(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can spell these, but UTF-8 cannot


@dataclass(frozen=True)
class DataRecord:
    """One row of a data file, and `where` it stands (`file:line`)."""

    where: str
    row: dict[str, Any]

    def text(self, key: str, expected: str = "a string") -> str:
        """Return the string under `key`. Raises: DataError when absent or of another type."""
        value = self.value(key)
        if not isinstance(value, str):
            raise DataError(f"{self.where}: {key}", f"expected {expected}, got {_short(value)}")
        if not value.isascii() and _SURROGATE.search(value):
            raise DataError(f"{self.where}: {key}", "half of a surrogate pair is not text")
        return value

    def text_or_number(self, key: str) -> str:
        """Return the string or finite number under `key`, as text. Raises: DataError, as `text`."""
        if self.has_number(key):
            return str(self.row[key])
        return self.text(key, "a string or a finite number")

    def has_number(self, key: str) -> bool:
        """Whether a finite number is under `key`."""
        value = self.row.get(key)
        return math.isfinite(value) if isinstance(value, float) else type(value) is int

    def value(self, key: str) -> Any:
        """Return the value under `key`. Raises: DataError that lists the keys there are."""
        if key not in self.row:
            have = ", ".join(repr(k) for k in self.row) or "none"
            raise DataError(f"{self.where}: {key}", f"no such key in this record (it has {have})")
        return self.row[key]


def read_records(path: str) -> list[DataRecord]:
    """Return all records of the file or slice, in file order; never empty.

    Raises: DataError (missing file, malformed line, no record), ConfigError (unknown kind of file).
    """
    return _read(path, {".jsonl": _read_jsonl, ".parquet": _read_parquet})


def read_documents(path: str, key: str, separator: str) -> list[DataRecord]:
    """Return the records of text documents, like `read_records`, also from a .txt file.

    `separator` stands between two documents of a .txt file. "" says that the file is one document.
    """

    def read_text(file: Path) -> list[DataRecord]:
        return _read_text(file, key, separator)

    return _read(path, {".jsonl": _read_jsonl, ".parquet": _read_parquet, ".txt": read_text})


def _read(path: str, readers: dict[str, Callable[[Path], list[DataRecord]]]) -> list[DataRecord]:
    file, wanted = _split_slice(path)
    if not file.is_file():
        raise DataError(
            str(file), "this is a folder, not a file" if file.is_dir() else "no such file"
        )
    if file.suffix not in readers:
        raise ConfigError(f"{file}: data files end in {' or '.join(readers)}")
    records = readers[file.suffix](file)
    if not records:
        raise DataError(str(file), "the file holds no record")
    if not records[wanted]:
        raise DataError(path, f"the slice is empty: the file holds {len(records)} records")
    return records[wanted]


def _split_slice(path: str) -> tuple[Path, slice]:
    match = _SLICE.fullmatch(path)
    if match is None:
        if path.endswith("]") and "@" in path:
            raise ConfigError(
                f"{path}: write a slice as path@[start:stop], where either number may be left out"
            )
        return Path(path), slice(None)
    start, stop = (int(text) if text else None for text in match.group("start", "stop"))
    return Path(match["path"]), slice(start, stop)


def _read_jsonl(file: Path) -> list[DataRecord]:
    return [_record(f"{file}:{number}", line) for number, line in numbered_lines(file)]


def _record(where: str, line: bytes) -> DataRecord:
    row = parse_json(where, line)
    if not isinstance(row, dict):
        raise DataError(where, f"expected a JSON object, got {_short(row)}")
    return DataRecord(where, row)


def _read_parquet(file: Path) -> list[DataRecord]:
    try:
        from pyarrow import lib, parquet
    except ImportError as error:
        raise ConfigError(
            f"reading {file} needs pyarrow: pip install -e '.[parquet]' in its repository"
        ) from error
    try:
        rows = parquet.read_table(file).to_pylist()
    except (lib.ArrowInvalid, OSError) as error:
        raise DataError(str(file), f"not a parquet file: {error}") from error
    return [DataRecord(f"{file}:{number}", row) for number, row in enumerate(rows, start=1)]


def _read_text(file: Path, key: str, separator: str) -> list[DataRecord]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(str(file), f"not UTF-8 at byte {error.start + 1}") from error
    documents = text.split(separator) if separator else [text]
    texts = (document.strip() for document in documents)
    return [
        DataRecord(f"{file}, document {number}", {key: text})
        for number, text in enumerate(filter(None, texts), start=1)
    ]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
