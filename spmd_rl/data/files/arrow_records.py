"""Records of a .parquet file, or of a Hugging Face dataset that `save_to_disk` has written.

Both are tables in the Arrow format. Of a table on disk, only the rows that are being read are in
memory. A large parquet file is unpacked into such a table first.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.files.arrow_values import rows_of
from spmd_rl.data.files.record import DataRecord, Records, WatchedRecords
from spmd_rl.errors import ConfigError, DataError
from spmd_rl.observe.jsonl import parse_json

_IN_MEMORY = 1 << 26  # bytes of a parquet file that is not unpacked to disk
_BATCH = 512  # rows of an unpacked parquet file that are read at once
_STATE, _SPLITS = "state.json", "dataset_dict.json"


class ArrowRecords(Records):
    """The rows of Arrow record batches.

    `open_batches` returns what gives a batch by its number, for the time of one reading, so that no
    mapped page stays. `num_rows` are the rows of the batches. `order` says which row each record
    is; None: as stored.
    """

    def __init__(
        self,
        path: Path,
        open_batches: Callable[[], Callable[[int], Any]],
        *,
        num_rows: Sequence[int],
        num_bytes: int,
        files: Sequence[Path],
        order: NDArray[np.int64] | None = None,
    ) -> None:
        self._path, self._files, self._order = path, files, order
        self._open_batches = open_batches
        self._starts = np.array([0, *accumulate(num_rows)], np.int64)
        self.num_bytes = num_bytes

    def __len__(self) -> int:
        return int(self._starts[-1]) if self._order is None else len(self._order)

    def read(self, numbers: Sequence[int]) -> list[DataRecord]:
        """Return these records."""
        if not numbers:
            return []
        rows = np.array(numbers, np.int64)
        if self._order is not None:
            rows = self._order[rows]
        of = np.searchsorted(self._starts, rows, side="right") - 1
        breaks = (np.diff(rows) != 1) | (np.diff(of) != 0)
        batch_of = self._open_batches()
        places = [f"{self._path}:{number + 1}" for number in numbers]
        found: list[dict[str, Any]] = []
        for run in np.split(rows, np.flatnonzero(breaks) + 1):  # of rows that follow each other
            batch = int(of[len(found)])
            start = int(run[0] - self._starts[batch])
            of_run = places[len(found) : len(found) + len(run)]
            found += rows_of(batch_of(batch).slice(start, len(run)), of_run)
        return [DataRecord(place, row) for place, row in zip(places, found, strict=True)]

    def digest(self) -> str:
        """Return a digest of the files' bytes."""
        digest = hashlib.sha256()
        for path in self._files:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()


def open_parquet(file: Path) -> ArrowRecords:
    """Open a parquet file. Raises: DataError when it is none, ConfigError without pyarrow."""
    _require_pyarrow(file)
    from pyarrow import lib, parquet

    try:
        with parquet.ParquetFile(file) as table:
            content = table.metadata
            groups = map(content.row_group, range(content.num_row_groups))
            num_bytes = sum(group.total_byte_size for group in groups)
            if num_bytes > _IN_MEMORY:
                batch_of, num_rows = _unpacked(table)
            else:
                held = [*table.iter_batches()]
                batch_of, num_rows = held.__getitem__, [batch.num_rows for batch in held]
    except (lib.ArrowException, OSError) as error:
        raise DataError(str(file), f"not a parquet file: {error}") from error
    return ArrowRecords(
        file, lambda: batch_of, num_rows=num_rows, num_bytes=num_bytes, files=[file]
    )


def _unpacked(table: Any) -> tuple[Callable[[int], Any], list[int]]:
    """Return what reads the batches of a parquet file from a temporary file, and their rows.

    The space of the file is free when that is gone. Raises: ConfigError when there is no space.
    """
    import pyarrow
    from pyarrow import ipc

    num_rows: list[int] = []
    try:
        with tempfile.TemporaryDirectory(prefix="spmd-rl-data-") as folder:
            path = Path(folder) / "rows.arrow"
            with path.open("wb") as file, ipc.new_file(file, table.schema_arrow) as writer:
                for batch in table.iter_batches(batch_size=_BATCH):
                    writer.write_batch(batch)
                    num_rows.append(batch.num_rows)
            # what is open can be read although it has no name any more
            return ipc.open_file(pyarrow.OSFile(str(path))).get_batch, num_rows
    except OSError as error:
        if error.errno is None:  # it is not the system's, but says what is wrong in the file
            raise
        raise ConfigError(
            f"a large parquet file is unpacked into a temporary folder, and that failed: "
            f"{error}: make space, or set TMPDIR to a folder with more of it"
        ) from error


def is_dataset(folder: Path) -> bool:
    """Whether a folder is a data set that `save_to_disk` has written, or several splits of one."""
    return (folder / _STATE).is_file() or (folder / _SPLITS).is_file()


def open_dataset(folder: Path) -> Records:
    """Open a data set that `save_to_disk` has written.

    Raises: DataError when it is damaged or has several splits, ConfigError without pyarrow.
    """
    if (folder / _SPLITS).is_file():
        content = parse_json(str(folder / _SPLITS), (folder / _SPLITS).read_bytes())
        splits = content.get("splits", []) if isinstance(content, dict) else []
        named = ", ".join(str(folder / str(name)) for name in splits)
        raise DataError(str(folder), f"the data set has several splits: name one of {named}")
    _require_pyarrow(folder)
    state = parse_json(str(folder / _STATE), (folder / _STATE).read_bytes())
    files = _files(folder, state, "_data_files")
    if not files:
        raise DataError(str(folder / _STATE), "_data_files names no file")
    indices = _files(folder, state, "_indices_data_files")
    return WatchedRecords(
        [folder / _STATE, *files, *indices], lambda: _open_mapped(folder, files, indices)
    )


def _open_mapped(folder: Path, files: list[Path], indices: list[Path]) -> ArrowRecords:
    def open_batches() -> list[Any]:
        return [batch for file in files for batch in _mapped(file)]

    batches = open_batches()
    order = [batch.column(0).to_numpy() for file in indices for batch in _mapped(file)]
    return ArrowRecords(
        folder,
        lambda: open_batches().__getitem__,
        num_rows=[batch.num_rows for batch in batches],
        num_bytes=sum(batch.nbytes for batch in batches),
        files=[*files, *indices],
        order=np.concatenate(order).astype(np.int64) if order else None,
    )


def _files(folder: Path, state: Any, key: str) -> list[Path]:
    """Return the files that the state of a data set names. Raises: DataError for another form."""
    try:
        return [folder / file["filename"] for file in state.get(key) or ()]
    except (AttributeError, TypeError, KeyError) as error:
        raise DataError(f"{folder / _STATE}: {key}", "expected a list of files") from error


def _mapped(file: Path) -> list[Any]:
    """Return the record batches of an Arrow file, without reading their contents."""
    import pyarrow
    from pyarrow import ipc, lib

    try:
        with ipc.open_stream(pyarrow.memory_map(str(file))) as stream:
            return [*stream]
    except (lib.ArrowException, OSError) as error:
        raise DataError(str(file), f"not an Arrow file: {error}") from error


def _require_pyarrow(path: Path) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"reading {path} needs pyarrow: pip install -e '.[data]' in its repository"
        ) from error
