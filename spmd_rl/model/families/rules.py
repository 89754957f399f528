"""Rules: how a parameter of Megatron-core on one rank is made of rows of Hugging Face tensors.

A part is a range of whole rows of the parameter, and the box of a tensor that these rows are. How a
tensor is cut, it says itself (`TensorSpec.cut`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from spmd_rl.model.held.tensor import Along, part_box
from spmd_rl.model.layers.layer import TensorSpec
from spmd_rl.weights.plan.layout import Box, Dims, range_box

Range = tuple[int, int]  # first row, and the row after the last
Tensors = Mapping[str, TensorSpec]  # the Hugging Face tensors, by the name within a block


@dataclass(frozen=True)
class Part:
    """The rows `rows` of a rank's parameter are the box `box` of the tensor `name`."""

    name: str
    shape: Dims
    box: Box
    rows: Range


class Rule(Protocol):
    """How one parameter is made."""

    def parts(self, tensors: Tensors, rank: Along) -> Iterator[Part]:
        """Yield the parts of a rank's parameter, in the order of its rows."""
        ...


class Joined:
    """A rank's parts of one tensor or of several, one after the other along the rows.

    Rows beyond a vocabulary pad it, and are in no part.
    """

    def __init__(self, *names: str) -> None:
        self.names = names

    def parts(self, tensors: Tensors, rank: Along) -> Iterator[Part]:
        row = 0
        for name in self.names:
            one = tensors[name]
            box = part_box(one, rank)
            if box.extent[0] > 0:
                yield Part(name, one.shape, box, (row, row + box.extent[0]))
            row += box.extent[0]


@dataclass(frozen=True)
class QkvByGroup:
    """For each group of query heads that share a key-value head: its queries, key and value.

    There are as many groups as units of the key. Ranks hold equal blocks of these rows. With more
    ranks than key-value heads, blocks end within a group.
    """

    query: str
    key: str
    value: str

    def parts(self, tensors: Tensors, rank: Along) -> Iterator[Part]:
        sizes = [(name, tensors[name].shape) for name in (self.query, self.key, self.value)]
        cut = tensors[self.key].cut
        num_groups = 1 if cut is None else cut.num_units
        start, stop = rank.of(sum(shape[0] for _, shape in sizes))
        row = 0
        for group in range(num_groups):
            for name, shape in sizes:
                size = shape[0] // num_groups
                first, last = max(start, row), min(stop, row + size)
                if first < last:
                    base = group * size - row
                    box = range_box(shape, 0, first + base, last + base)
                    yield Part(name, shape, box, (first - start, last - start))
                row += size
