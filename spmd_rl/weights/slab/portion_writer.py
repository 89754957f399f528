"""PortionWriter: the rank's end of pushes through a slab."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from spmd_rl.errors import StaleSlabError, WeightsError
from spmd_rl.weights.plan.layout import ITEM_BYTES, Box, Dims
from spmd_rl.weights.slab.peer_socket import (
    EndOfPush,
    PeerSocket,
    PortionAck,
    PortionEntry,
    PortionTable,
    RepeatedPortion,
)
from spmd_rl.weights.slab.portions import MAX_KEPT_TABLES, half_bytes, wait_for_stream
from spmd_rl.weights.slab.slab import ALIGN_BYTES, Slab

SlotRequest = tuple[str, Box, Dims, str]  # the arguments of `slot`
_table_ids = itertools.count(1)


@dataclass
class SlotList:
    """The slots of one portion, in the order in which they were requested.

    `table_id` is the number under which the reader knows them; None: it does not know them.
    """

    requests: list[SlotRequest] = field(default_factory=list)
    entries: list[PortionEntry] = field(default_factory=list)
    views: list[Tensor] = field(default_factory=list)
    table_id: int | None = None

    def first(self, count: int) -> SlotList:
        """Return the first slots as a list that the reader does not know."""
        return SlotList(self.requests[:count], self.entries[:count], self.views[:count])


class PortionWriter:
    """The rank's end of a push. One writer serves all pushes over a slab.

    A box larger than `max_bytes` does not fit a half: the caller cuts it, as `cut_box` does. After
    an error neither the writer nor the socket is of further use, and the peer is to be ended.
    """

    def __init__(self, slab: Slab, peer: PeerSocket, deadline_s: float) -> None:
        self.max_bytes = half_bytes(slab)
        self._slab = slab
        self._generation = slab.generation
        self._peer = peer
        self._deadline_s = deadline_s
        self._num_sent = self._num_acked = 0
        self._kept: list[SlotList] = []  # by number of the portion, from earlier pushes
        self._slots = SlotList()  # of the portion that is being filled, or was in an earlier push
        self._num_slots = 0  # of these that were requested in this push

    def slot(self, name: str, box: Box, shape: Dims, dtype: str) -> Tensor | None:
        """Return where the box of a tensor of this global shape is to be put, as a tensor of the
        box's extent. None: the half is full, and `flush` makes room.

        Raises: StaleSlabError when the slab was closed.
        """
        self._check_slab()
        request, index = (name, box, shape, dtype), self._num_slots
        slots = self._slots
        if index < len(slots.requests) and slots.requests[index] == request:
            self._num_slots += 1
            return slots.views[index]
        return self._new_slot(request)

    def repeat(self, table_id: int) -> bool:
        """Request all slots of an earlier portion again, as `slot` would.

        Return False, and request none, where the next portion has another table or was begun.
        """
        self._check_slab()
        if self._num_slots or table_id != self._slots.table_id:
            return False
        self._num_slots = len(self._slots.requests)
        return True

    def flush(self) -> int | None:
        """Hand over all slots since the last flush, which the current CUDA stream has filled.
        Return the number of the portion's table for `repeat`; None where it is not kept.

        Blocks: until the stream is done and the other half is free again; the peer frees it.
        Raises: LostRankError when the peer is gone, DeadlineError when it does not answer,
        WeightsError with its words when it fails.
        """
        if not self._num_slots:
            return None
        slots, number = self._slots, self._num_sent
        if self._num_slots < len(slots.requests):
            slots = slots.first(self._num_slots)
        message = self._message(slots, number)
        wait_for_stream(self._slab.device)
        self._peer.send(message, self._deadline_s)
        self._begin(number + 1)
        self._wait_for_acks(number)
        return slots.table_id if number < MAX_KEPT_TABLES else None

    def drain(self) -> None:
        """Flush. Blocks and raises as `flush`, until the peer has copied everything."""
        self.flush()
        self._wait_for_acks(self._num_sent)

    def finish(self) -> None:
        """Flush, and end the push. Blocks and raises as `flush`, until all halves are free."""
        self.flush()
        self._peer.send(EndOfPush(self._num_sent), self._deadline_s)
        self._wait_for_acks(self._num_sent)
        self._num_acked = 0
        self._begin(0)

    def _new_slot(self, request: SlotRequest) -> Tensor | None:
        """Return a slot that the same portion of an earlier push did not have here."""
        name, box, shape, dtype = request
        num_bytes = box.num_elements * ITEM_BYTES[dtype]
        if num_bytes > self.max_bytes:
            raise WeightsError(
                f"a box of '{name}' has {num_bytes} bytes and a portion {self.max_bytes}: cut it"
            )
        slots, count = self._slots, self._num_slots
        start, used_bytes = self._num_sent % 2 * self.max_bytes, 0
        if count:
            used_bytes = slots.entries[count - 1].offset + slots.views[count - 1].nbytes - start
            used_bytes = -(-used_bytes // ALIGN_BYTES) * ALIGN_BYTES
        if used_bytes + num_bytes > self.max_bytes:
            return None
        offset = start + used_bytes
        view = self._slab.view(self._generation, offset, dtype, box.extent)
        if slots.table_id is not None:
            slots = slots.first(count)
        slots.requests.append(request)
        slots.entries.append(PortionEntry(name, box, dtype, shape, offset))
        slots.views.append(view)
        self._slots = slots
        self._num_slots += 1
        return view

    def _message(self, slots: SlotList, number: int) -> PortionTable | RepeatedPortion:
        """Return what tells the reader of a portion, and keep the portion's slots."""
        half: Literal[0, 1] = 1 if number % 2 else 0
        if slots.table_id is not None:
            return RepeatedPortion(self._generation, number, half, slots.table_id)
        slots.table_id = next(_table_ids)
        if number < MAX_KEPT_TABLES:
            self._kept[number : number + 1] = [slots]
        return PortionTable(self._generation, number, half, slots.table_id, slots.entries)

    def _begin(self, number: int) -> None:
        """Begin to fill a portion, in the expectation that it has the slots it had before."""
        self._num_sent = number
        self._slots = self._kept[number] if number < len(self._kept) else SlotList()
        self._num_slots = 0

    def _check_slab(self) -> None:
        if self._slab.generation != self._generation:
            self._kept, self._slots, self._num_slots = [], SlotList(), 0
            raise StaleSlabError(
                f"slab {self._generation} was closed: make a writer over the new slab"
            )

    def _wait_for_acks(self, num_acks: int) -> None:
        while self._num_acked < num_acks:
            ack = self._peer.receive(self._deadline_s)
            if ack != PortionAck(self._generation, self._num_acked):
                raise WeightsError(
                    f"{self._peer.peer} sent {ack} in place of an acknowledgement of portion "
                    f"{self._num_acked} in slab {self._generation}"
                )
            self._num_acked += 1
