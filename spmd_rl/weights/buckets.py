"""Buckets of a push, from a rank to the process that generates on its GPU, through a slab.

The slab has two halves. The rank fills one with boxes of tensors while the other process copies
out the boxes of the other half. A table says what lies in a half; an acknowledgement gives the half
back.

    rank      fill half 0, table 0   fill half 1, table 1   wait for ack 0, fill half 0, table 2
    process                          copy half 0, ack 0     copy half 1, ack 1

A table is sent when the bytes are in the slab, and an acknowledgement when the copies are done:
both ends wait for their own CUDA stream first, because no stream waits for another process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from spmd_rl.errors import StaleSlabError, WeightsError
from spmd_rl.weights.layout import ITEM_BYTES, Box, Dims
from spmd_rl.weights.peer_socket import (
    BucketAck,
    BucketEntry,
    BucketTable,
    EndOfPush,
    Failure,
    PeerSocket,
)
from spmd_rl.weights.slab import ALIGN_BYTES, MappedSlab, Slab

READ_DEADLINE_S = 600.0


def cut_box(box: Box, item_bytes: int, max_bytes: int) -> Iterator[Box]:
    """Yield boxes of at most `max_bytes` that together are `box`, in the order of its elements.

    Whole rows stay together where they fit; else each row is cut in the same way.
    """
    if box.num_elements * item_bytes <= max_bytes:
        yield box
        return
    if not box.extent or item_bytes > max_bytes:
        raise WeightsError(f"a bucket of {max_bytes} bytes has no room for one element")
    row_bytes = box.num_elements // box.extent[0] * item_bytes
    step = max(1, max_bytes // row_bytes)
    for start in range(0, box.extent[0], step):
        size = min(step, box.extent[0] - start)
        offset = box.offset[0] + start
        if row_bytes <= max_bytes:
            yield Box((offset, *box.offset[1:]), (size, *box.extent[1:]))
        else:
            for part in cut_box(Box(box.offset[1:], box.extent[1:]), item_bytes, max_bytes):
                yield Box((offset, *part.offset), (1, *part.extent))


class BucketWriter:
    """The rank's end of a push. One writer serves all pushes over a slab.

    A box larger than `max_bytes` does not fit a half: the caller cuts it, as `cut_box` does. After
    an error neither the writer nor the socket is of further use, and the peer is to be ended.
    """

    def __init__(self, slab: Slab, peer: PeerSocket, deadline_s: float) -> None:
        self.max_bytes = _half_bytes(slab)
        self._slab = slab
        self._peer = peer
        self._deadline_s = deadline_s
        self._entries: list[BucketEntry] = []
        self._used_bytes = 0
        self._num_sent = self._num_acked = 0

    def slot(self, name: str, box: Box, shape: Dims, dtype: str) -> Tensor | None:
        """Return where the box of a tensor of this global shape is to be put, as a tensor of the
        box's extent. None: the half is full, and `flush` makes room.
        """
        num_bytes = box.num_elements * ITEM_BYTES[dtype]
        if num_bytes > self.max_bytes:
            raise WeightsError(
                f"a box of '{name}' has {num_bytes} bytes and a bucket {self.max_bytes}: cut it"
            )
        if self._used_bytes + num_bytes > self.max_bytes:
            return None
        offset = self._num_sent % 2 * self.max_bytes + self._used_bytes
        view = self._slab.view(self._slab.generation, offset, dtype, box.extent)
        self._entries.append(BucketEntry(name, box, dtype, shape, offset))
        self._used_bytes += -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
        return view

    def flush(self) -> None:
        """Hand over all slots since the last flush, which the current CUDA stream has filled.

        Blocks: until the stream is done and the other half is free again; the peer frees it.
        Raises: LostRankError when the peer is gone, DeadlineError when it does not answer,
        WeightsError with its words when it fails.
        """
        if not self._entries:
            return
        _synchronize(self._slab.device)
        half: Literal[0, 1] = 1 if self._num_sent % 2 else 0
        table = BucketTable(self._slab.generation, self._num_sent, half, self._entries)
        self._peer.send(table, self._deadline_s)
        self._entries, self._used_bytes = [], 0
        self._num_sent += 1
        self._wait_for_acks(self._num_sent - 1)

    def finish(self) -> None:
        """Flush, and end the push. Blocks and raises as `flush`, until all halves are free."""
        self.flush()
        self._peer.send(EndOfPush(self._num_sent), self._deadline_s)
        self._wait_for_acks(self._num_sent)
        self._num_sent = self._num_acked = 0

    def _wait_for_acks(self, num_acks: int) -> None:
        while self._num_acked < num_acks:
            ack = self._peer.receive(self._deadline_s)
            if ack != BucketAck(self._slab.generation, self._num_acked):
                raise WeightsError(
                    f"{self._peer.peer} sent {ack} in place of an acknowledgement of bucket "
                    f"{self._num_acked} in slab {self._slab.generation}"
                )
            self._num_acked += 1


@dataclass(frozen=True)
class Bucket:
    """The boxes in one half of a slab, and a view of each. Both may be used until the ack."""

    generation: int
    number: int
    half: int
    entries: list[BucketEntry]
    tensors: list[Tensor]


class BucketReader:
    """The other process's end of one push: iterate over its buckets, and acknowledge each.

    A bucket may be acknowledged after the next one came, but in order. The writer fills at most
    one bucket ahead.
    """

    def __init__(
        self, mapped: MappedSlab, peer: PeerSocket, deadline_s: float = READ_DEADLINE_S
    ) -> None:
        self._mapped = mapped
        self._peer = peer
        self._deadline_s = deadline_s
        self._half_bytes = _half_bytes(mapped)
        self._num_read = self._num_acked = 0

    def __iter__(self) -> Iterator[Bucket]:
        """Yield the buckets until the end of the push.

        Blocks: until the next bucket is there; the peer sends it.
        Raises: LostRankError when the peer is gone, DeadlineError after the deadline,
        StaleSlabError when a bucket lies in another slab, WeightsError when a table is wrong. The
        peer is told of the last two.
        """
        while True:
            message = self._peer.receive(self._deadline_s)
            if message == EndOfPush(self._num_read):
                return
            try:
                bucket = self._open(message)
            except WeightsError as error:
                self.fail(str(error))
                raise
            self._num_read += 1
            yield bucket

    def ack(self, bucket: Bucket) -> None:
        """Give the half of a bucket back. Blocks: until the current CUDA stream, on which the
        bucket was copied, is done.
        """
        if bucket.number != self._num_acked:
            raise WeightsError(
                f"bucket {bucket.number} cannot be acknowledged before bucket {self._num_acked}"
            )
        _synchronize(self._mapped.device)
        self._peer.send(BucketAck(bucket.generation, bucket.number))
        self._num_acked += 1

    def fail(self, sentence: str) -> None:
        """Tell the peer why this push cannot go on; the peer raises a WeightsError."""
        self._peer.send(Failure(sentence))

    def _open(self, message: object) -> Bucket:
        if not isinstance(message, BucketTable):
            raise WeightsError(f"{message} came where bucket {self._num_read} was expected")
        if message.generation != self._mapped.generation:
            raise StaleSlabError(
                f"bucket {message.number} lies in slab {message.generation}, and slab "
                f"{self._mapped.generation} is mapped"
            )
        number, half = message.number, message.half
        if (number, half) != (self._num_read, self._num_read % 2):
            raise WeightsError(
                f"bucket {number} in half {half} came where bucket {self._num_read} was expected"
            )
        if number - self._num_acked >= 2:
            raise WeightsError(f"bucket {number} came before bucket {number - 2} was free")
        tensors = [self._view(half, entry) for entry in message.entries]
        return Bucket(message.generation, number, half, message.entries, tensors)

    def _view(self, half: int, entry: BucketEntry) -> Tensor:
        box, start = entry.box, half * self._half_bytes
        if not len(box.offset) == len(box.extent) == len(entry.shape):
            raise WeightsError(f"the box of '{entry.name}' has other dims than its tensor")
        if any(
            low < 0 or size < 0 or low + size > dim
            for low, size, dim in zip(box.offset, box.extent, entry.shape, strict=True)
        ):
            raise WeightsError(f"the box of '{entry.name}' lies outside its tensor")
        view = self._mapped.view(self._mapped.generation, entry.offset, entry.dtype, box.extent)
        if entry.offset < start or entry.offset + view.nbytes > start + self._half_bytes:
            raise WeightsError(f"the box of '{entry.name}' lies outside half {half} of the slab")
        return view


def _half_bytes(slab: Slab | MappedSlab) -> int:
    half_bytes = slab.num_bytes // 2 // ALIGN_BYTES * ALIGN_BYTES
    if not half_bytes:
        raise WeightsError(f"a slab of {slab.num_bytes} bytes is too small for two buckets")
    return half_bytes


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
