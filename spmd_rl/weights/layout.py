"""Which box of which canonical tensor a rank holds. Plain data, fit for the wire; no torch.

A tensor is known by its Hugging Face name. A box is an offset and an extent in each of its dims; a
box of zero elements is legal (a rank beyond the last chunk of an uneven shard).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

Dims = tuple[int, ...]


@dataclass(frozen=True, order=True)
class Box:
    """A block of a tensor: elements `offset[d] .. offset[d] + extent[d]` in each dim d."""

    offset: Dims
    extent: Dims

    @property
    def num_elements(self) -> int:
        return prod(self.extent)

    @property
    def end(self) -> Dims:
        return tuple(o + e for o, e in zip(self.offset, self.extent, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common block, or None where there is no common element."""
        offset, extent = [], []
        for ours, our_size, theirs, their_size in zip(
            self.offset, self.extent, other.offset, other.extent, strict=True
        ):
            start = max(ours, theirs)
            size = min(ours + our_size, theirs + their_size) - start
            if size <= 0:
                return None
            offset.append(start)
            extent.append(size)
        return Box(tuple(offset), tuple(extent))

    def subtract(self, hole: Box) -> Iterator[Box]:
        """Disjoint blocks that cover this one less `hole`, a block inside it."""
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

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where this block lies in a tensor that holds just `outer`."""
        starts = (o - base for o, base in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(s, s + e) for s, e in zip(starts, self.extent, strict=True))


@dataclass(frozen=True)
class Piece:
    """One rank's share of one tensor: global `shape`, the `box` held, the element type
    (`"float32"`).
    """

    name: str
    shape: Dims
    dtype: str
    box: Box


@dataclass(frozen=True)
class Layout:
    """All that one rank of the world holds, at most one piece a tensor."""

    rank: int
    pieces: tuple[Piece, ...]


def chunk_box(shape: Dims, part: int, num_parts: int) -> Box:
    """The rows that FSDP2 gives part `part`: ceil-sized chunks of dim 0, the last ones short or
    empty.
    """
    rows = -(-shape[0] // num_parts)
    start = min(part * rows, shape[0])
    return Box((start, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - start), *shape[1:]))


def disjoint(boxes: Iterable[Box]) -> bool:
    """Whether no two of these boxes, all different, have an element in common."""
    beside: list[Box] = []  # those seen that reach as far down as the next one begins
    for box in sorted(boxes):
        beside = [one for one in beside if one.end[0] > box.offset[0]]
        if any(box.intersect(one) for one in beside):
            return False
        beside.append(box)
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
