"""Many small objects as a few long columns: how they cross between processes, and are reckoned
with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray


@dataclass(frozen=True)
class Columns:
    """Rows as columns, to be read only: arrays, lists, and columns again.

    Those named in `END_TO_END` have `lengths` entries for each row, end to end; others have one.
    """

    END_TO_END: ClassVar[tuple[str, ...]]

    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, rows: slice) -> Self:
        """The columns of rows next to each other."""
        start, stop, _ = rows.indices(len(self))
        if stop - start == len(self):
            return self
        entries = slice(self.ends[start], self.ends[stop])
        return type(self)(
            **{
                name: own[entries if name in self.END_TO_END else rows]
                for name, own in self._named()
            }
        )

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, of which there is at least one."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            **{
                name: _joined([getattr(part, name) for part in parts])
                for name, _ in parts[0]._named()
            }
        )

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Where each row's entries end, after a 0."""
        return ends(self.lengths)

    def check(self) -> None:
        """Raises: ValueError when the columns do not fit each other."""
        if self.lengths.ndim != 1 or (self.ends[1:] < self.ends[:-1]).any():
            raise ValueError("lengths are numbers of entries, and so is their sum")
        num_rows, num_entries = len(self), int(self.ends[-1])
        for name, column in self._named():
            size = num_entries if name in self.END_TO_END else num_rows
            if getattr(column, "ndim", 1) != 1 or len(column) != size:
                raise ValueError(f"{name} has not {size} entries")

    def _named(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self.__match_args__]


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], Columns):
        return type(parts[0]).join(parts)
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    whole: list[Any] = []
    for part in parts:
        whole += part
    return whole


def end_to_end(arrays: Sequence[NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
    """Any number of arrays, none included, as one of that dtype."""
    return np.concatenate(arrays).astype(dtype, copy=False) if len(arrays) else np.zeros(0, dtype)


def ends(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Where each of sequences that lie end to end ends, after a 0."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def pieces(whole: Any, ends: NDArray[np.int64]) -> list[Any]:
    """A sequence cut into the pieces that end there."""
    return [whole[start:end] for start, end in pairwise(ends.tolist())]


def places(lengths: NDArray[np.integer], rows: NDArray[np.integer]) -> NDArray[np.int64]:
    """Where the entries of `rows` lie, row by row, among rows of these lengths that lie end to end."""
    own = lengths[rows].astype(np.int64)
    starts, own_starts = np.cumsum(lengths, dtype=np.int64)[rows] - own, np.cumsum(own) - own
    return np.arange(own.sum()) + np.repeat(starts - own_starts, own)
