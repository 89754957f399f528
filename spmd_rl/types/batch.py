"""Training batch: sequences laid end to end, with what the loss needs of each token. numpy only.

Shape letters used here and in docstrings elsewhere: N sequences of a batch, T tokens of all of
them.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spmd_rl.errors import ContractError
from spmd_rl.types.columns import entry_indices, offsets_of
from spmd_rl.types.partition import balanced_partition
from spmd_rl.types.token_values import TokenValues

COLUMN_DTYPES = (np.dtype(np.float32), np.dtype(np.int32))


@dataclass(frozen=True)
class Batch:
    """Sequences ready to train on, laid end to end.

    `mask` marks the tokens that the loss uses. Log-probs and advantages at position t belong to
    token t, which is predicted from the tokens before it in its sequence. So the first token of a
    sequence is never in the mask.

    The loss is sum(weight * per-token loss) / denominator. `weight` and `denominator` are fixed
    for the whole batch before it is split over ranks and micro-batches. So the loss does not depend
    on either split.

    `versions` holds the version of the weights that drew each token, -1 for tokens that no engine
    drew. `index` is a sequence's position in the batch before any split.

    `columns` holds whatever else a loss reads of each token, by name: `Sample.columns`, and what a
    recipe adds, as float32 or int32. They ride to `LossInput.columns`. `kept` holds the
    `Sample.kept` of each sequence, for its last tokens; it is empty where nothing was filtered.
    `unit` consecutive sequences are never split over ranks or micro-batches: 2 for pairs.
    `part_sizes` says of a shard how many sequences each of its parts has, where it has several.

    Shape: `tokens`, `mask`, `weight`, `advantages`, `rollout_logprobs`, `versions` are [T];
    `lengths`, `temperature`, `index`, `kept` are [N]; `columns` are [T] or [T, K].
    """

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    mask: NDArray[np.bool_]
    weight: NDArray[np.float32]
    advantages: NDArray[np.float32]
    rollout_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    temperature: NDArray[np.float32]
    index: NDArray[np.int32]
    denominator: float
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    kept: list[NDArray[np.uint8]] = field(default_factory=list)
    unit: int = 1
    part_sizes: tuple[int, ...] = ()

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_learned(self) -> NDArray[np.int64]:
        """How many tokens of each sequence are in the mask. Shape: [N]."""
        return np.diff(offsets_of(self.mask)[offsets_of(self.lengths)])

    def select(self, indices: list[int] | NDArray[np.intp]) -> Batch:
        """Return the sequences `indices`, in that order, with the same denominator."""
        return self._select(_Selection(self.lengths, np.asarray(indices, dtype=np.int64)))

    def _select(self, selection: _Selection) -> Batch:
        of_tokens, rows = selection.of_tokens, selection.rows
        return Batch(
            tokens=of_tokens(self.tokens),
            lengths=selection.of_sequences(self.lengths),
            mask=of_tokens(self.mask),
            weight=of_tokens(self.weight),
            advantages=of_tokens(self.advantages),
            rollout_logprobs=of_tokens(self.rollout_logprobs),
            versions=of_tokens(self.versions),
            temperature=selection.of_sequences(self.temperature),
            index=selection.of_sequences(self.index),
            denominator=self.denominator,
            columns={name: of_tokens(column) for name, column in self.columns.items()},
            kept=[self.kept[row] for row in rows.tolist()] if self.kept else [],
            unit=self.unit,
            part_sizes=selection.part_sizes,
        )

    def with_columns(self, **columns: NDArray[Any] | TokenValues) -> Batch:
        """Return the batch with more columns, or with others of the same name.

        Shape: each [T] or [T, K]. Raises: ContractError for another shape or dtype.
        """
        arrays = {
            name: column.values if isinstance(column, TokenValues) else column
            for name, column in columns.items()
        }
        for name, column in arrays.items():
            if column.ndim not in (1, 2) or len(column) != self.num_tokens:
                shape = list(column.shape)
                raise ContractError(
                    f"the column {name!r} has the shape {shape}: expected a row for each of the "
                    f"batch's {self.num_tokens} tokens, [T] or [T, K]"
                )
            if column.dtype not in COLUMN_DTYPES:
                raise ContractError(
                    f"the column {name!r} is {column.dtype}: expected float32 or int32"
                )
        return replace(self, columns=self.columns | arrays)

    def shard(self, num_shards: int, num_parts: int = 0) -> list[Batch]:
        """Split into `num_shards` batches of nearly equal token count; some may be empty.

        With `num_parts`, each shard consists of some of the shards that there would be of so many:
        shard r has those with the numbers r, r + num_shards and so on.

        The arrays of the shards are read-only, and so are those of the batch from now on. A batch
        with more columns, or with others, has the same arrays in its shards as this one elsewhere:
        so each crosses to a rank once (controller/channel/shared_arrays.py).
        """
        layouts = _layouts(self.lengths)
        key = num_shards, num_parts, self.unit
        if key not in layouts:
            found = balanced_partition(self.unit_lengths().tolist(), num_parts or num_shards)
            parts = [self.sequences_of(units) for units in found]
            layouts[key] = [
                _Selection.of_parts(self.lengths, parts[first::num_shards])
                for first in range(num_shards)
            ]
        return [self._select(selection) for selection in layouts[key]]

    def parts(self) -> list[Batch]:
        """Return the parts of a shard, which is one part where nothing else is said."""
        if not self.part_sizes:
            return [self]
        ends = np.cumsum(self.part_sizes)
        return [
            self.select(np.arange(end - size, end))
            for size, end in zip(self.part_sizes, ends, strict=True)
        ]

    def unit_lengths(self) -> NDArray[np.int32]:
        """Return how many tokens each unit has: sequences that are never split apart."""
        if self.unit == 1:
            return self.lengths
        return self.lengths.reshape(-1, self.unit).sum(1, dtype=np.int32)

    def sequences_of(self, units: list[int]) -> list[int]:
        """Return the sequences of these units, in order."""
        if self.unit == 1:
            return units
        return [unit * self.unit + offset for unit in units for offset in range(self.unit)]


class _Selection:
    """Some sequences of batches that have the same `lengths`.

    With `keeps` it returns the same part of an array each time, and both are read-only. It keeps
    these arrays, but for `lengths`.
    Shape: `lengths` is [N]; `rows` are indices of sequences.
    """

    def __init__(
        self,
        lengths: NDArray[np.int32],
        rows: NDArray[np.int64],
        part_sizes: tuple[int, ...] = (),
        *,
        keeps: bool = False,
    ) -> None:
        self.rows = rows
        self.part_sizes = part_sizes
        self._lengths_id = id(lengths)
        self._entries = entry_indices(lengths, rows)
        self._kept: dict[int, tuple[NDArray[Any], NDArray[Any]]] | None = {} if keeps else None

    @classmethod
    def of_parts(cls, lengths: NDArray[np.int32], parts: list[list[int]]) -> _Selection:
        """Return a selection that keeps its arrays, of sequences that consist of some parts."""
        rows = np.array([row for part in parts for row in part], np.int64)
        sizes = tuple(map(len, parts)) if len(parts) > 1 else ()
        return cls(lengths, rows, sizes, keeps=True)

    def of_sequences(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the sequences' part of an array of [N]."""
        return self._part(values, self.rows)

    def of_tokens(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the sequences' part of an array of [T] or [T, K]."""
        return self._part(values, self._entries)

    def _part(self, values: NDArray[Any], indices: NDArray[np.int64]) -> NDArray[Any]:
        if self._kept is None:
            return values[indices]
        if id(values) not in self._kept:
            part = values[indices]
            part.flags.writeable = values.flags.writeable = False
            # The array is kept, so that no other gets its id. The lengths live as long as this.
            is_lengths = id(values) == self._lengths_id
            self._kept[id(values)] = part if is_lengths else values, part
        return self._kept[id(values)][1]


_Layouts = dict[tuple[int, int, int], list[_Selection]]  # by numbers of shards and parts, and unit
_known: dict[int, tuple[weakref.ref[Any], _Layouts]] = {}  # by id of the lengths


def _layouts(lengths: NDArray[np.int32]) -> _Layouts:
    """Return how batches of these lengths were split before, for as long as the array lives."""
    key = id(lengths)
    if key not in _known:
        _known[key] = weakref.ref(lengths, lambda _: _known.pop(key, None)), {}
    return _known[key][1]
