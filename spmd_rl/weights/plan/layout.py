"""Layout of a rank's weights: the box that it holds of each tensor, as plain data without torch.

A tensor is known by its Hugging Face name. A box is an offset and an extent in each dim of the
tensor. It may be empty, as on a rank beyond the last chunk of an uneven shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

Dims = tuple[int, ...]


@dataclass(frozen=True, order=True)
class Box:
    """A block of a tensor: the indices `offset[d] .. offset[d] + extent[d]` in each dim d."""

    offset: Dims
    extent: Dims

    @property
    def num_elements(self) -> int:
        return prod(self.extent)

    @property
    def end(self) -> Dims:
        return tuple(o + e for o, e in zip(self.offset, self.extent, strict=True))

    @property
    def index(self) -> tuple[slice, ...]:
        """The index of this block in the whole tensor."""
        return tuple(map(slice, self.offset, self.end))

    def intersect(self, other: Box) -> Box | None:
        """Return the common block; None where there is no common element."""
        offset, extent = [], []
        for start, size, other_start, other_size in zip(
            self.offset, self.extent, other.offset, other.extent, strict=True
        ):
            end = min(start + size, other_start + other_size)
            start = max(start, other_start)
            size = end - start
            if size <= 0:
                return None
            offset.append(start)
            extent.append(size)
        return Box(tuple(offset), tuple(extent))

    def subtract(self, hole: Box) -> Iterator[Box]:
        """Yield disjoint blocks that together cover this one without `hole`, a block inside it."""
        offset, extent = list(self.offset), list(self.extent)
        for dim in range(len(offset)):
            before = hole.offset[dim] - offset[dim]
            after = offset[dim] + extent[dim] - hole.end[dim]
            for start, size in ((offset[dim], before), (hole.end[dim], after)):
                if size > 0:
                    yield Box(
                        (*offset[:dim], start, *offset[dim + 1 :]),
                        (*extent[:dim], size, *extent[dim + 1 :]),
                    )
            offset[dim], extent[dim] = hole.offset[dim], hole.extent[dim]

    def row_blocks(self, num_rows: int) -> Iterator[Box]:
        """Yield blocks of so many rows that together are this one; the last may have fewer."""
        for start in range(0, self.extent[0], num_rows):
            size = min(num_rows, self.extent[0] - start)
            yield Box((self.offset[0] + start, *self.offset[1:]), (size, *self.extent[1:]))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the index of this block in a tensor that holds just the block `outer`."""
        starts = (o - base for o, base in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(s, s + e) for s, e in zip(starts, self.extent, strict=True))


@dataclass(frozen=True)
class Piece:
    """One rank's share of one tensor: its global `shape`, its `dtype` ("float32"), and the `box`
    that the rank holds.

    The other end of a push may lack a tensor that is `private` to this one.
    """

    name: str
    shape: Dims
    dtype: str
    box: Box
    private: bool = False


PiecesByKind = Mapping[str, Sequence[Piece]]  # of one rank: its weights, its moments


@dataclass(frozen=True)
class Layout:
    """All pieces that one rank of the world holds; it may have several boxes of a tensor."""

    rank: int
    pieces: tuple[Piece, ...]


def whole_box(shape: Dims) -> Box:
    """Return the box of a whole tensor."""
    return Box((0,) * len(shape), shape)


def chunk_box(shape: Dims, part: int, num_parts: int) -> Box:
    """Return the rows that FSDP2 gives to shard `part`: equal chunks of dim 0, of which the last
    may be short or empty.
    """
    rows = -(-shape[0] // num_parts)
    return range_box(shape, 0, part * rows, (part + 1) * rows)


def chunk_of_box(box: Box, part: int, num_parts: int) -> Box:
    """Return the rows of a box that FSDP2 gives to shard `part` of those that share it."""
    rows = chunk_box(box.extent, part, num_parts)
    offset = tuple(o + first for o, first in zip(box.offset, rows.offset, strict=True))
    return Box(offset, rows.extent)


@lru_cache(maxsize=1024)  # the many experts of a mixture have few shapes
def range_box(shape: Dims, dim: int, start: int, stop: int) -> Box:
    """Return the box of a range along `dim`, as far as the tensor has it; it may be empty."""
    start, stop = min(start, shape[dim]), min(stop, shape[dim])
    offset, extent = [0] * len(shape), list(shape)
    offset[dim], extent[dim] = start, max(stop - start, 0)
    return Box(tuple(offset), tuple(extent))


def disjoint(boxes: Iterable[Box]) -> bool:
    """Whether no two of these boxes, which all differ, have an element in common."""
    candidates: list[Box] = []  # earlier boxes that reach into the rows of the current one
    for box in sorted(boxes):
        candidates = [other for other in candidates if other.end[0] > box.offset[0]]
        if any(box.intersect(other) for other in candidates):
            return False
        candidates.append(box)
    return True


ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
}
