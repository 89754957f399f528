"""BucketReader: the end of pushes through a slab in the process that generates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spmd_rl.errors import StaleSlabError, WeightsError
from spmd_rl.weights.buckets import MAX_KEPT_TABLES, half_bytes, wait_for_stream
from spmd_rl.weights.peer_socket import (
    BucketAck,
    BucketEntry,
    BucketTable,
    EndOfPush,
    PeerFailure,
    PeerSocket,
    RepeatedBucket,
)
from spmd_rl.weights.slab import MappedSlab

READ_DEADLINE_S = 600.0


@dataclass(eq=False)
class Bucket:
    """The boxes in one half of a slab, and a view of each. Both may be used until the ack.

    Where a push repeats a bucket, it is the same object.
    """

    generation: int
    number: int
    half: int
    table_id: int
    entries: list[BucketEntry]
    tensors: list[Tensor]
    _targets: list[Tensor] = field(default_factory=list, init=False)

    def copy(self, target: Callable[[BucketEntry], Tensor]) -> None:
        """Copy each box to its `target`, which is the same memory whenever the bucket is repeated.
        It is asked for once.
        """
        if not self._targets:
            self._targets = [target(entry) for entry in self.entries]
        if self._targets:
            torch._foreach_copy_(self._targets, self.tensors)


class BucketReader:
    """The other process's end of a push. One reader serves all pushes over a slab: iterate over the
    buckets of each push, and acknowledge each bucket.

    A bucket may be acknowledged after the next one came, but in order. The writer fills at most
    one bucket ahead.
    """

    def __init__(
        self, mapped: MappedSlab, peer: PeerSocket, deadline_s: float = READ_DEADLINE_S
    ) -> None:
        self._mapped = mapped
        self._peer = peer
        self._deadline_s = deadline_s
        self._half_bytes = half_bytes(mapped)
        self._num_read = self._num_acked = 0
        self._kept: list[Bucket] = []  # by number, from earlier pushes

    def __iter__(self) -> Iterator[Bucket]:
        """Yield the buckets until the end of the push.

        Blocks: until the next bucket is there; the peer sends it.
        Raises: LostRankError when the peer is gone, DeadlineError after the deadline,
        StaleSlabError when a bucket lies in another slab, WeightsError when a message is wrong. The
        peer is told of the last two.
        """
        self._num_read = self._num_acked = 0
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
        wait_for_stream(self._mapped.device)
        self._peer.send(BucketAck(bucket.generation, bucket.number))
        self._num_acked += 1

    def fail(self, sentence: str) -> None:
        """Tell the peer why this push cannot go on; the peer raises a WeightsError."""
        self._peer.send(PeerFailure(sentence))

    def _open(self, message: object) -> Bucket:
        if not isinstance(message, BucketTable | RepeatedBucket):
            raise WeightsError(f"{message} came where bucket {self._num_read} was expected")
        if message.generation != self._mapped.generation:
            self._kept.clear()
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
        if isinstance(message, RepeatedBucket):
            return self._repeated(number, message.table_id)
        return self._new(message)

    def _repeated(self, number: int, table_id: int) -> Bucket:
        if number >= len(self._kept) or self._kept[number].table_id != table_id:
            raise WeightsError(
                f"bucket {number} repeats table {table_id}, which never came or was replaced"
            )
        return self._kept[number]

    def _new(self, table: BucketTable) -> Bucket:
        """Check a table and keep it, in place of the one that the bucket had before."""
        number, half = table.number, table.half
        tensors = [self._view(half, entry) for entry in table.entries]
        bucket = Bucket(table.generation, number, half, table.table_id, table.entries, tensors)
        if number < MAX_KEPT_TABLES:
            self._kept[number : number + 1] = [bucket]
        return bucket

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
