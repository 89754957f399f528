"""Records of a .parquet file, or of a Hugging Face dataset that `save_to_disk` has written.

Both are tables in the Arrow format. A table on disk is mapped into memory, which holds only the
pages that are in use. A large parquet file is unpacked into such a table first.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.record import DataRecord, Records
from spmd_rl.errors import ConfigError, DataError
from spmd_rl.observe.jsonl import parse_json

_IN_MEMORY = 1 << 26  # bytes of a parquet file that is not unpacked to disk
_BATCH = 8192  # rows that are unpacked at once
_STATE, _SPLITS = "state.json", "dataset_dict.json"


class ArrowRecords(Records):
    """The rows of Arrow record batches. `order` says which row each record is; None: as stored."""

    def __init__(
        self,
        path: Path,
        batches: Sequence[Any],
        files: Sequence[Path],
        order: NDArray[np.int64] | None = None,
    ) -> None:
        self._path, self._files, self._order = path, files, order
        self._batches = [batch for batch in batches if batch.num_rows]
        self._stops = np.array([*accumulate(b.num_rows for b in self._batches)], np.int64)
        self.num_bytes = sum(batch.nbytes for batch in self._batches)

    def __len__(self) -> int:
        if self._order is not None:
            return len(self._order)
        return int(self._stops[-1]) if len(self._stops) else 0

    def read(self, numbers: Sequence[int]) -> list[DataRecord]:
        """Return these records."""
        rows = numbers if self._order is None else self._order[list(numbers)].tolist()
        return [
            DataRecord(f"{self._path}:{number + 1}", self._row(row))
            for number, row in zip(numbers, rows, strict=True)
        ]

    def digest(self) -> str:
        """Return a digest of the files' bytes."""
        digest = hashlib.sha256()
        for path in self._files:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def _row(self, row: int) -> dict[str, Any]:
        number = int(np.searchsorted(self._stops, row, side="right"))
        batch = self._batches[number]
        found: dict[str, Any] = batch.slice(
            row - int(self._stops[number]) + batch.num_rows, 1
        ).to_pylist()[0]
        return found


def open_parquet(file: Path) -> ArrowRecords:
    """Open a parquet file. Raises: DataError when it is none, ConfigError without pyarrow."""
    _require_pyarrow(file)
    from pyarrow import lib, parquet

    try:
        with parquet.ParquetFile(file) as table:
            groups = (table.metadata.row_group(n) for n in range(table.metadata.num_row_groups))
            is_small = sum(group.total_byte_size for group in groups) <= _IN_MEMORY
            rows = table.iter_batches(batch_size=_BATCH)
            batches = [*rows] if is_small else _unpacked(table.schema_arrow, rows)
    except (lib.ArrowException, OSError) as error:
        raise DataError(str(file), f"not a parquet file: {error}") from error
    return ArrowRecords(file, batches, [file])


def is_dataset(folder: Path) -> bool:
    """Whether a folder is a data set that `save_to_disk` has written, or several splits of one."""
    return (folder / _STATE).is_file() or (folder / _SPLITS).is_file()


def open_dataset(folder: Path) -> ArrowRecords:
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
    batches = [batch for file in files for batch in _mapped(file)]
    order = [batch.column(0).to_numpy() for file in indices for batch in _mapped(file)]
    in_order = np.concatenate(order).astype(np.int64) if order else None
    return ArrowRecords(folder, batches, [*files, *indices], in_order)


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


def _unpacked(schema: Any, batches: Iterable[Any]) -> list[Any]:
    """Write batches into a temporary file; return them mapped. Its space is free after their use.

    Raises: ConfigError when there is no space.
    """
    from pyarrow import ipc

    with tempfile.TemporaryDirectory(prefix="spmd-rl-data-") as folder:
        path = Path(folder) / "rows.arrow"
        # reading fails for the parquet file's sake, writing for want of space
        with path.open("wb") as file, ipc.new_stream(file, schema) as stream:
            for batch in batches:
                try:
                    stream.write_batch(batch)
                except OSError as error:
                    raise ConfigError(
                        f"a large parquet file is unpacked into {Path(folder).parent}, and that "
                        f"failed: {error}: make space, or set TMPDIR to a folder with more of it"
                    ) from error
        return _mapped(path)


def _require_pyarrow(path: Path) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"reading {path} needs pyarrow: pip install -e '.[data]' in its repository"
        ) from error
