"""PortionReader: the end of pushes through a slab in the process that generates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spmd_rl.errors import StaleSlabError, WeightsError
from spmd_rl.weights.slab.peer_socket import (
    EndOfPush,
    PeerFailure,
    PeerSocket,
    PortionAck,
    PortionEntry,
    PortionTable,
    RepeatedPortion,
)
from spmd_rl.weights.slab.portions import MAX_KEPT_TABLES, half_bytes, wait_for_stream
from spmd_rl.weights.slab.slab import MappedSlab

READ_DEADLINE_S = 600.0


@dataclass(eq=False)
class Portion:
    """The boxes in one half of a slab, and a view of each. Both may be used until the ack.

    Where a push repeats a portion, it is the same object.
    """

    generation: int
    number: int
    half: int
    table_id: int
    entries: list[PortionEntry]
    tensors: list[Tensor]
    _targets: list[Tensor] = field(default_factory=list, init=False)

    def copy(self, target: Callable[[PortionEntry], Tensor]) -> None:
        """Copy each box to its `target`, which is the same memory whenever the portion is repeated.
        It is asked for once.
        """
        if not self._targets:
            self._targets = [target(entry) for entry in self.entries]
        if self._targets:
            torch._foreach_copy_(self._targets, self.tensors)


class PortionReader:
    """The other process's end of a push. One reader serves all pushes over a slab: iterate over the
    portions of each push, and acknowledge each portion.

    A portion may be acknowledged after the next one came, but in order. The writer fills at most
    one portion ahead.
    """

    def __init__(
        self, mapped: MappedSlab, peer: PeerSocket, deadline_s: float = READ_DEADLINE_S
    ) -> None:
        self._mapped = mapped
        self._peer = peer
        self._deadline_s = deadline_s
        self._half_bytes = half_bytes(mapped)
        self._num_read = self._num_acked = 0
        self._kept: list[Portion] = []  # by number, from earlier pushes

    def __iter__(self) -> Iterator[Portion]:
        """Yield the portions until the end of the push.

        Blocks: until the next portion is there; the peer sends it.
        Raises: LostRankError when the peer is gone, DeadlineError after the deadline,
        StaleSlabError when a portion lies in another slab, WeightsError when a message is wrong.
        The peer is told of the last two.
        """
        self._num_read = self._num_acked = 0
        while True:
            message = self._peer.receive(self._deadline_s)
            if message == EndOfPush(self._num_read):
                return
            try:
                portion = self._open(message)
            except WeightsError as error:
                self.fail(str(error))
                raise
            self._num_read += 1
            yield portion

    def ack(self, portion: Portion) -> None:
        """Give the half of a portion back. Blocks: until the current CUDA stream, on which the
        portion was copied, is done.
        """
        if portion.number != self._num_acked:
            raise WeightsError(
                f"portion {portion.number} cannot be acknowledged before portion {self._num_acked}"
            )
        wait_for_stream(self._mapped.device)
        self._peer.send(PortionAck(portion.generation, portion.number))
        self._num_acked += 1

    def fail(self, sentence: str) -> None:
        """Tell the peer why this push cannot go on; the peer raises a WeightsError."""
        self._peer.send(PeerFailure(sentence))

    def _open(self, message: object) -> Portion:
        if not isinstance(message, PortionTable | RepeatedPortion):
            raise WeightsError(f"{message} came where portion {self._num_read} was expected")
        if message.generation != self._mapped.generation:
            self._kept.clear()
            raise StaleSlabError(
                f"portion {message.number} lies in slab {message.generation}, and slab "
                f"{self._mapped.generation} is mapped"
            )
        number, half = message.number, message.half
        if (number, half) != (self._num_read, self._num_read % 2):
            raise WeightsError(
                f"portion {number} in half {half} came where portion {self._num_read} was expected"
            )
        if number - self._num_acked >= 2:
            raise WeightsError(f"portion {number} came before portion {number - 2} was free")
        if isinstance(message, RepeatedPortion):
            return self._repeated(number, message.table_id)
        return self._new(message)

    def _repeated(self, number: int, table_id: int) -> Portion:
        if number >= len(self._kept) or self._kept[number].table_id != table_id:
            raise WeightsError(
                f"portion {number} repeats table {table_id}, which never came or was replaced"
            )
        return self._kept[number]

    def _new(self, table: PortionTable) -> Portion:
        """Check a table and keep it, in place of the one that the portion had before."""
        number, half = table.number, table.half
        tensors = [self._view(half, entry) for entry in table.entries]
        portion = Portion(table.generation, number, half, table.table_id, table.entries, tensors)
        if number < MAX_KEPT_TABLES:
            self._kept[number : number + 1] = [portion]
        return portion

    def _view(self, half: int, entry: PortionEntry) -> Tensor:
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
