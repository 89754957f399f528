"""PackedBucket: boxes that lie side by side in a buffer, for one send between two ranks.

The buffer is another one in each push. What else the copies need is prepared in the first push:
later, a bucket takes one launch to pack and one to unpack on a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from spmd_rl.weights.copies import copy_all
from spmd_rl.weights.ends import LocalEnds, WeightSource
from spmd_rl.weights.plan.moves import Move

ALIGN_BYTES = 16


class PackedBucket:
    """The boxes of some moves, in their order, in a buffer of `num_bytes`.

    `unpacking` is for the end that receives it: the sink's number for their slots, and the copies
    to these.
    """

    def __init__(self, moves: Sequence[Move]) -> None:
        self.moves = moves
        self.num_bytes = 0
        self.unpacking: tuple[int, BucketCopies] | None = None
        self._starts: list[int] = []
        for move in moves:
            self._starts.append(self.num_bytes)
            self.num_bytes += aligned(move.num_bytes)
        self._packing: tuple[list[int], BucketCopies] | None = None

    def new_buffer(self, device: torch.device) -> Tensor:
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=device)

    def start(self, index: int) -> int:
        """Return where a box begins in the buffer, in bytes."""
        return self._starts[index]

    def dtype(self, index: int) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.moves[index].dtype)
        return found

    def part(self, index: int, buffer: Tensor) -> Tensor:
        """Return a box of the buffer, as a tensor of the box's extent."""
        move, start = self.moves[index], self._starts[index]
        flat = buffer[start : start + move.num_bytes].view(self.dtype(index))
        return flat.view(move.box.extent)

    def pack(self, ends: LocalEnds) -> Tensor:
        """Return a new buffer with the boxes of the source, cast to the dtypes of the moves."""
        source, buffer = ends.the_source(), self.new_buffer(ends.device)
        self._packing = self._packing or self._prepared(source)
        made, copies = self._packing
        for index in made:
            move = self.moves[index]
            source.read(move.name, move.box, self.part(index, buffer))
        copies.run(buffer)
        return buffer

    def _prepared(self, source: WeightSource) -> tuple[list[int], BucketCopies]:
        """Return the boxes that the source has to make, and copies of its memory of the others."""
        views = [source.view(move.name, move.box) for move in self.moves]
        made = [index for index, view in enumerate(views) if view is None]
        held = {index: view for index, view in enumerate(views) if view is not None}
        return made, BucketCopies(self, held, to_buffer=True)


class BucketCopies:
    """Copies between boxes of a bucket and tensors that keep their memory, in one direction.

    `tensors` has the tensor of each box, by its number in the bucket. The buffer that holds the
    bucket is another one in each run.
    """

    def __init__(
        self, bucket: PackedBucket, tensors: dict[int, Tensor], *, to_buffer: bool
    ) -> None:
        self._bucket, self._to_buffer = bucket, to_buffer
        self._runs: list[Callable[[Tensor], object]] = []
        self._rest = dict(tensors)  # that our kernel does not take
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._add_kernels()

    def run(self, buffer: Tensor) -> None:
        """Copy everything. On a GPU, the copies are queued on the current stream."""
        for run in self._runs:
            run(buffer)
        if self._rest:
            parts = [self._bucket.part(index, buffer) for index in self._rest]
            tensors = list(self._rest.values())
            copy_all(*((parts, tensors) if self._to_buffer else (tensors, parts)))

    def _add_kernels(self) -> None:
        from spmd_rl.kernels.runtime import run_copies

        lists: dict[tuple[torch.dtype, torch.dtype], list[int]] = defaultdict(list)
        for index, tensor in self._rest.items():
            dtype = self._bucket.dtype(index)
            if run_copies.can_use_buffer(tensor, dtype, self._to_buffer):
                lists[dtype, tensor.dtype].append(index)
        for (dtype, _), indices in lists.items():
            tensors = [self._rest.pop(index) for index in indices]
            starts = [self._bucket.start(index) for index in indices]
            programs = run_copies.programs_beside_nccl(tensors[0].device)
            copies = run_copies.BufferCopies(tensors, starts, dtype, self._to_buffer, programs)
            self._runs.append(copies.run)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
