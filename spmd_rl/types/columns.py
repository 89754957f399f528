"""Columnar form of many small objects: a few long arrays that cross between processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    it.
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
        sliced = {
            name: column[entries if name in self.RAGGED else rows]
            for name, column in self._columns()
        }
        return type(self)(**sliced)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Return the rows of all parts, of which there is at least one."""
        if len(parts) == 1:
            return parts[0]
        joined = {}
        for name, _ in parts[0]._columns():
            columns = [getattr(part, name) for part in parts]
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
            expected = num_entries if name in self.RAGGED else num_rows
            is_left_out = name in self.OPTIONAL and not len(column)
            if getattr(column, "ndim", 1) != 1 or (len(column) != expected and not is_left_out):
                raise ValueError(f"{name} must have {expected} entries")

    def _columns(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self.__match_args__]


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
