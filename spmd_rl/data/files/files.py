"""Records of data files, each with its file and line for error messages.

`train.jsonl@[100:200]` means records 100 to 199. Negative numbers count from the end, as in Python.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from spmd_rl.config.likely import did_you_mean_path
from spmd_rl.data.files.arrow_records import is_dataset, open_dataset, open_parquet
from spmd_rl.data.files.csv_records import read_csv
from spmd_rl.data.files.json_records import read_json
from spmd_rl.data.files.jsonl_records import JsonLines
from spmd_rl.data.files.record import (
    DataRecord,
    ListedRecords,
    Records,
    SlicedRecords,
    WatchedRecords,
)
from spmd_rl.errors import ConfigError, DataError

Listed = list[DataRecord | DataError]

# OWNER/NAME, without the suffix of a file; Path makes one slash of two
_HUB_NAME = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-]+(\.\d[\w-]*)*)")
_HUB_URL = re.compile(r"(hf:/+|https:/+huggingface\.co/)datasets/(?P<name>[\w.-]+/[\w.-]+)")
_SLICE = re.compile(r"(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")


def open_records(path: str) -> Records:
    """Open the file or slice. There is at least one record.

    Only .json, .csv and .txt files are read as a whole.
    Raises: DataError (missing or malformed file, no record), ConfigError (unknown kind of file).
    """
    return _open(path, _OPENERS)


def open_documents(path: str, key: str, separator: str) -> Records:
    """Open a file of text documents, like `open_records`, also a .txt file.

    `separator` stands between two documents of a .txt file. "" says that the file is one document.
    """

    def open_text(file: Path) -> Records:
        return _listed(file, lambda file, content: _read_text(file, content, key, separator))

    return _open(path, _OPENERS | {".txt": open_text})


def without_slice(path: str) -> Path:
    """Return the file or folder of a path, without the slice."""
    return _split_slice(path)[0]


def _open(path: str, openers: dict[str, Callable[[Path], Records]]) -> Records:
    file, wanted = _split_slice(path)
    records = _opened(file, openers)
    if not len(records):
        raise DataError(str(file), "the file holds no record")
    numbers = range(len(records))[wanted]
    if not numbers:
        raise DataError(path, f"the slice is empty: the file holds {len(records)} records")
    return records if len(numbers) == len(records) else SlicedRecords(records, numbers)


def _opened(file: Path, openers: dict[str, Callable[[Path], Records]]) -> Records:
    if file.is_dir():
        if not is_dataset(file):
            raise DataError(str(file), _not_a_dataset(file, openers))
        return open_dataset(file)
    if not file.is_file():
        raise DataError(str(file), _missing(str(file)))
    if file.suffix in _COMPRESSED or _begins_with(file, _GZIP):
        raise DataError(str(file), "the file is compressed: unpack it first")
    if file.suffix not in openers:
        *others, last = openers
        raise ConfigError(f"{file}: data files end in {', '.join(others)} or {last}")
    return WatchedRecords([file], lambda: openers[file.suffix](file))


def _not_a_dataset(folder: Path, openers: Iterable[str]) -> str:
    problem = "this is a folder, not a file or a data set of save_to_disk"
    inside = (file for file in sorted(folder.rglob("*")) if file.suffix in openers)
    example = next(inside, None)
    return f"{problem}: name a file in it, such as {example}" if example else problem


def _missing(path: str) -> str:
    """Return what is wrong with a path where nothing is, which may be a name of the Hub."""
    found = _HUB_URL.match(path) or _HUB_NAME.fullmatch(path)
    if not found or did_you_mean_path(path):
        return f"no such file{did_you_mean_path(path)}"
    name = found["name"]
    return (
        "no such file; data is read from disk: for a data set of the Hub, run `hf download "
        f"--repo-type dataset {name} --local-dir {name.rpartition('/')[2]}` and name a file of it"
    )


def _begins_with(file: Path, magic: bytes) -> bool:
    with file.open("rb") as content:
        return content.read(len(magic)) == magic


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


def _listed(file: Path, read: Callable[[Path, bytes], Listed]) -> ListedRecords:
    content = file.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    records = read(file, content) if content.strip() else []
    return ListedRecords(records, len(content), digest)


def _read_text(file: Path, content: bytes, key: str, separator: str) -> Listed:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(str(file), f"not UTF-8 at byte {error.start + 1}") from error
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    documents = text.split(separator) if separator else [text]
    texts = (document.strip() for document in documents)
    return [
        DataRecord(f"{file}, document {number}", {key: text})
        for number, text in enumerate(filter(None, texts), start=1)
    ]


_GZIP = b"\x1f\x8b"
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".zip")
_OPENERS: dict[str, Callable[[Path], Records]] = {
    ".jsonl": JsonLines,
    ".json": lambda file: _listed(file, read_json),
    ".traj": lambda file: _listed(file, read_json),
    ".csv": lambda file: _listed(file, read_csv),
    ".parquet": open_parquet,
}
