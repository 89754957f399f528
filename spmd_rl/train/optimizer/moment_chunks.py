"""Layout of moments in host memory, and the chunks in which they pass through a GPU. Pure.

All tensors of a kind lie one after the other in one flat space, each at a multiple of `UNIT`. A
chunk is a range of that space. A large tensor is split over chunks, and a chunk has several small
ones. The update is elementwise, so a chunk can be updated without the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Elements that a tensor begins at a multiple of. It is a multiple of what vector instructions take
# at once, so that each element is updated by the same instructions as in a whole tensor.
UNIT = 256
CHUNK_ELEMENTS = 16 << 20  # 64 MiB of each moment
NUM_SLOTS = 3  # chunks on the GPU at once: one is read, one is updated, one is written back


@dataclass(frozen=True)
class ChunkPart:
    """Elements `start` to `start + count` of a tensor, which lie at `offset` of a chunk."""

    name: str
    start: int
    offset: int
    count: int


@dataclass(frozen=True)
class Chunk:
    """Elements `start` to `start + count` of the flat space, and the parts of tensors in it."""

    start: int
    count: int
    parts: tuple[ChunkPart, ...]


@dataclass(frozen=True)
class MomentLayout:
    """Where each tensor begins, the elements of the whole space, and its chunks in order."""

    offsets: Mapping[str, int]
    num_elements: int
    chunks: tuple[Chunk, ...]


def lay_out(sizes: Mapping[str, int], chunk_elements: int) -> MomentLayout:
    """Return the layout of tensors of these sizes, in chunks of at most `chunk_elements`.

    Units: elements. `chunk_elements` is a multiple of `UNIT`. Empty tensors are in no chunk.
    """
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-size // UNIT) * UNIT
    chunks: list[Chunk] = []
    parts: list[ChunkPart] = []
    for name, size in sizes.items():
        start = 0
        while start < size:
            chunk_start = chunk_elements * len(chunks)
            offset = offsets[name] + start - chunk_start
            count = min(size - start, chunk_elements - offset)
            parts.append(ChunkPart(name, start, offset, count))
            start += count
            if _is_full(parts[-1], chunk_elements):
                chunks.append(Chunk(chunk_start, chunk_elements, tuple(parts)))
                parts = []
    if parts:
        chunk_start = chunk_elements * len(chunks)
        chunks.append(Chunk(chunk_start, end - chunk_start, tuple(parts)))
    return MomentLayout(offsets, end, tuple(chunks))


def _is_full(last: ChunkPart, chunk_elements: int) -> bool:
    """Return whether no other tensor can begin in the chunk of this part."""
    end = -(-(last.offset + last.count) // UNIT) * UNIT
    return end == chunk_elements
