"""Columnar form of many small objects: a few long arrays that cross between processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

C = TypeVar("C", bound="Columns")


@dataclass(frozen=True)
class Columns:
    """Rows stored as columns. A column is an array, a list, or columns again. Read-only.

    A column named in `RAGGED` holds `lengths[i]` entries for row i, all rows end to end. Every
    other column holds one entry a row. A column named in `OPTIONAL` is empty where `default` makes
    it. A column may also be a dict of arrays by name, each of which is a ragged column; rows that
    lack an array have zeros in it.
    """

    RAGGED: ClassVar[tuple[str, ...]]
    OPTIONAL: ClassVar[tuple[str, ...]] = ()

    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, rows: slice) -> Self:
        """Return the columns of consecutive rows."""
        start, stop, _ = rows.indices(len(self))
        if stop - start == len(self):
            return self
        entries = slice(self.offsets[start], self.offsets[stop])
        sliced: dict[str, Any] = {
            name: _sliced(column, entries if name in self.RAGGED else rows)
            for name, column in self._columns()
        }
        return type(self)(**sliced)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Return the rows of all parts, of which there is at least one."""
        if len(parts) == 1:
            return parts[0]
        joined: dict[str, Any] = {}
        for name, _ in parts[0]._columns():
            columns = [getattr(part, name) for part in parts]
            if isinstance(columns[0], dict):
                counts = [int(part.offsets[-1]) for part in parts]
                joined[name] = join_by_name(columns, counts)
                continue
            if name in cls.OPTIONAL and any(map(len, columns)):
                columns = [part.filled(name) for part in parts]
            joined[name] = _join_column(columns)
        return cls(**joined)

    def filled(self, name: str) -> Any:
        """Return a column with all its entries, also where it is left out."""
        column = getattr(self, name)
        return self.default(name) if name in self.OPTIONAL and not len(column) else column

    def default(self, name: str) -> Any:
        """Return what a column is if it is left out. Classes with such columns have it."""
        raise NotImplementedError(name)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Row i has the entries from `offsets[i]` up to `offsets[i + 1]` of a ragged column."""
        return offsets_of(self.lengths)

    def check(self) -> None:
        """Raises: ValueError when the columns differ in their number of rows or entries."""
        if self.lengths.ndim != 1 or (self.offsets[1:] < self.offsets[:-1]).any():
            raise ValueError("lengths must be counts whose sum fits 64 bits")
        num_rows, num_entries = len(self), int(self.offsets[-1])
        for name, column in self._columns():
            if isinstance(column, dict):
                for key, values in column.items():
                    if not values.ndim or len(values) != num_entries:
                        raise ValueError(f"{name}[{key!r}] must have {num_entries} entries")
                continue
            expected = num_entries if name in self.RAGGED else num_rows
            is_left_out = name in self.OPTIONAL and not len(column)
            if getattr(column, "ndim", 1) != 1 or (len(column) != expected and not is_left_out):
                raise ValueError(f"{name} must have {expected} entries")

    def _columns(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self.__match_args__]


def _sliced(column: Any, part: slice) -> Any:
    if isinstance(column, dict):
        return {name: values[part] for name, values in column.items()}
    return column[part]


def join_by_name(
    parts: Sequence[Mapping[str, NDArray[Any]]], lengths: Sequence[int]
) -> dict[str, NDArray[Any]]:
    """Return arrays by name, those of all parts end to end; a part that lacks one has zeros.

    A part has `lengths[i]` entries. Raises: ValueError where an array has another dtype or shape in
    one part than in another.
    """
    found = {name: array for part in reversed(parts) for name, array in part.items()}
    return {
        name: np.concatenate(
            [
                _entries(name, part, like, length)
                for part, length in zip(parts, lengths, strict=True)
            ]
        )
        for name, like in found.items()
    }


def _entries(
    name: str, part: Mapping[str, NDArray[Any]], like: NDArray[Any], length: int
) -> NDArray[Any]:
    array = part.get(name)
    if array is None:
        return np.zeros((length, *like.shape[1:]), like.dtype)
    if array.dtype != like.dtype or array.shape[1:] != like.shape[1:]:
        raise ValueError(
            f"the column {name!r} is {array.dtype} with the shape {list(array.shape)} in one part, "
            f"and {like.dtype} with {list(like.shape)} in another"
        )
    return array


def _join_column(parts: list[Any]) -> Any:
    if isinstance(parts[0], Columns):
        return type(parts[0]).join(parts)
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    joined: list[Any] = []
    for part in parts:
        joined += part
    return joined


def consecutive_rows(rows: Iterable[tuple[C, int]]) -> list[tuple[C, int, int]]:
    """Return (columns, start, stop) of each run of neighbouring rows, from (columns, row) pairs."""
    runs: list[tuple[C, int, int]] = []
    for columns, number in rows:
        if runs and runs[-1][0] is columns and runs[-1][2] == number:
            runs[-1] = (columns, runs[-1][1], number + 1)
        else:
            runs.append((columns, number, number + 1))
    return runs


def concatenate(arrays: Sequence[NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
    """Return the arrays end to end as one of that dtype; without arrays, an empty one."""
    return np.concatenate(arrays).astype(dtype, copy=False) if len(arrays) else np.zeros(0, dtype)


def offsets_of(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Return where sequences of these lengths begin when laid end to end, and where the last ends.

    Shape: [N] to [N + 1].
    """
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def split_at(values: Any, offsets: NDArray[np.int64]) -> list[Any]:
    """Return the slices of `values` between neighbouring offsets."""
    return [values[start:end] for start, end in pairwise(offsets.tolist())]


def entry_indices(lengths: NDArray[np.integer], rows: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the positions of the entries of `rows`, row by row.

    `lengths` are those of all rows, which lie end to end.
    """
    row_lengths = lengths[rows].astype(np.int64)
    starts = np.cumsum(lengths, dtype=np.int64)[rows] - row_lengths
    new_starts = np.cumsum(row_lengths) - row_lengths
    return np.arange(row_lengths.sum()) + np.repeat(starts - new_starts, row_lengths)
