"""Rules: how a parameter of Megatron-core on one rank is made of rows of Hugging Face tensors.

A part is a range of whole rows of the parameter, and the box of a tensor that these rows are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from spmd_rl.weights.layout import Box, Dims

Range = tuple[int, int]  # first row, and the row after the last
Shapes = Mapping[str, Dims]  # of the Hugging Face tensors, by the name within a layer


@dataclass(frozen=True)
class Cut:
    """Which of `count` equal parts a rank holds."""

    count: int = 1
    index: int = 0

    def of(self, size: int) -> Range:
        """Return the rank's range of `size` rows, which is a multiple of `count`."""
        part = size // self.count
        return part * self.index, part * (self.index + 1)


UNCUT = Cut()


@dataclass(frozen=True)
class Part:
    """The rows `rows` of a rank's parameter are the box `box` of the tensor `name`."""

    name: str
    shape: Dims
    box: Box
    rows: Range


class Rule(Protocol):
    """How one parameter is made."""

    def parts(self, shapes: Shapes, cut: Cut) -> Iterator[Part]:
        """Yield the parts of a rank's parameter, in the order of its rows."""
        ...


@dataclass(frozen=True)
class Whole:
    """Every rank holds the whole tensor."""

    name: str

    def parts(self, shapes: Shapes, cut: Cut) -> Iterator[Part]:
        shape = shapes[self.name]
        yield Part(self.name, shape, _rows(shape, (0, shape[0])), (0, shape[0]))


@dataclass(frozen=True)
class Rows:
    """Each rank holds equally many rows. Rows beyond the tensor pad it, and are in no part."""

    name: str

    def parts(self, shapes: Shapes, cut: Cut) -> Iterator[Part]:
        shape = shapes[self.name]
        start, stop = cut.of(-(-shape[0] // cut.count) * cut.count)
        stop = min(stop, shape[0])
        if start < stop:
            yield Part(self.name, shape, _rows(shape, (start, stop)), (0, stop - start))


@dataclass(frozen=True)
class Columns:
    """Each rank holds equally many columns."""

    name: str

    def parts(self, shapes: Shapes, cut: Cut) -> Iterator[Part]:
        shape = shapes[self.name]
        start, stop = cut.of(shape[1])
        yield Part(self.name, shape, Box((0, start), (shape[0], stop - start)), (0, shape[0]))


@dataclass(frozen=True)
class GateUp:
    """A rank's rows of the gate projection, then its rows of the up projection."""

    gate: str
    up: str

    def parts(self, shapes: Shapes, cut: Cut) -> Iterator[Part]:
        first = 0
        for name in (self.gate, self.up):
            shape = shapes[name]
            start, stop = cut.of(shape[0])
            rows = first, first + stop - start
            yield Part(name, shape, _rows(shape, (start, stop)), rows)
            first = rows[1]


@dataclass(frozen=True)
class QkvByGroup:
    """For each group of query heads that share a key-value head: its queries, key and value.

    Ranks hold equal blocks of these rows. With more ranks than key-value heads, blocks end within
    a group.
    """

    query: str
    key: str
    value: str
    num_groups: int

    def parts(self, shapes: Shapes, cut: Cut) -> Iterator[Part]:
        sizes = [(name, shapes[name]) for name in (self.query, self.key, self.value)]
        start, stop = cut.of(sum(shape[0] for _, shape in sizes))
        row = 0
        for group in range(self.num_groups):
            for name, shape in sizes:
                size = shape[0] // self.num_groups
                first, last = max(start, row), min(stop, row + size)
                if first < last:
                    base = group * size - row
                    box = _rows(shape, (first + base, last + base))
                    yield Part(name, shape, box, (first - start, last - start))
                row += size


def _rows(shape: Dims, rows: Range) -> Box:
    """Return the box of some rows."""
    start, stop = rows
    return Box((start, *(0 for _ in shape[1:])), (stop - start, *shape[1:]))
