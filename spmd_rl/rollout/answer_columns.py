"""Further values of each token of the running sequences' answers, by name of the column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[Any]


class AnswerColumns:
    """The columns of `TokenData` for each row of a table, made at first use.

    A token for which a step lacks a column has zeros in it.
    """

    def __init__(self, num_rows: int, max_tokens: int) -> None:
        self._shape = num_rows, max_tokens
        self._columns: dict[str, _ValueColumn | _WideColumn] = {}

    def begin(self, row: int, columns: Mapping[str, Values]) -> None:
        """Begin a row with the columns of the answer that it has so far."""
        self._make(columns)
        for name, column in self._columns.items():
            column.begin(row, columns.get(name))

    def write(
        self, rows: NDArray[np.int64], positions: NDArray[np.int64], columns: Mapping[str, Values]
    ) -> None:
        """Write the values of one more token of each of `rows`, at this place of its answer.

        Shape: rows, positions [M]; columns [M] or [M, K].
        """
        self._make(columns)
        for name, values in columns.items():
            self._columns[name].write(rows, positions, values)

    def of(self, row: int, num_tokens: int) -> dict[str, Values]:
        """Return the columns of the first tokens of a row's answer."""
        return {name: column.of(row, num_tokens) for name, column in self._columns.items()}

    def _make(self, columns: Mapping[str, Values]) -> None:
        for name, like in columns.items():
            if name not in self._columns:
                is_wide = like.ndim > 1
                self._columns[name] = (
                    _WideColumn(self._shape[0], like)
                    if is_wide
                    else _ValueColumn(self._shape, like)
                )


class _ValueColumn:
    """One value a token: an array with room for the longest answers."""

    def __init__(self, shape: tuple[int, int], like: Values) -> None:
        self._values = np.zeros(shape, like.dtype)

    def begin(self, row: int, values: Values | None) -> None:
        self._values[row] = 0
        if values is not None:
            self._values[row, : len(values)] = values

    def write(self, rows: Values, positions: Values, values: Values) -> None:
        self._values[rows, positions] = values

    def of(self, row: int, num_tokens: int) -> Values:
        return self._values[row, :num_tokens].copy()


class _WideColumn:
    """Several values a token: bytes that grow with answers, as room for the longest is too much."""

    def __init__(self, num_rows: int, like: Values) -> None:
        self._like = like[:0]
        self._rows = [bytearray() for _ in range(num_rows)]

    def begin(self, row: int, values: Values | None) -> None:
        self._rows[row] = bytearray(b"" if values is None else values.tobytes())

    def write(self, rows: Values, positions: Values, values: Values) -> None:
        data, size = values.tobytes(), values[0].nbytes if len(values) else 0
        places = zip(rows.tolist(), positions.tolist(), strict=True)
        for number, (row, position) in enumerate(places):
            own = self._rows[row]
            own += bytes(position * size - len(own))  # of tokens that lack the column
            own += data[number * size : (number + 1) * size]

    def of(self, row: int, num_tokens: int) -> Values:
        values = np.zeros((num_tokens, *self._like.shape[1:]), self._like.dtype)
        known = np.frombuffer(bytes(self._rows[row]), self._like.dtype)
        values.reshape(-1)[: len(known)] = known
        return values
