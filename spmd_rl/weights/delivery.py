"""Delivery of boxes into a sink: batched copies, and flushes where the sink has no more room."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from spmd_rl.errors import WeightsError
from spmd_rl.weights.copies import Copies
from spmd_rl.weights.ends import WeightSink, WeightSource
from spmd_rl.weights.packing import BucketCopies, PackedBucket
from spmd_rl.weights.plan.moves import Move


@dataclass(frozen=True)
class DeliveredMoves:
    """Moves within one process between two flushes of its sink.

    Where they can be repeated at once, `prepared` holds the sink's number for their slots, and
    their copies.
    """

    moves: Sequence[Move]
    prepared: tuple[int, Copies] | None = None


class Delivery:
    """Puts boxes into one sink. Tensors that wait to be copied are kept until `flush`.

    `delivered` are the moves of this process that were flushed, for `repeat` in the next push.
    """

    def __init__(self, sink: WeightSink) -> None:
        self._sink = sink
        self._slots: list[Tensor] = []
        self._tensors: list[Tensor] = []
        self._has_slots = False  # some were given since the last flush
        self._moves: list[Move] = []  # of `put_from` since the last flush
        self._is_whole = True  # these are all boxes since then, and `flush` copies them
        self.delivered: list[DeliveredMoves] = []

    def put(self, move: Move, tensor: Tensor) -> None:
        """Have `tensor`, which holds the box of a move, copied to where the sink wants it."""
        for part, slot in self._parts(move):
            self._slots.append(slot)
            self._tensors.append(tensor[part.box.within(move.box)])
            self._is_whole = False

    def put_bucket(self, bucket: PackedBucket, buffer: Tensor) -> None:
        """Copy the boxes of a bucket to where the sink wants them, and have the sink use them.

        A later push repeats these copies at once if the sink gives the same slots.
        """
        if bucket.unpacking is not None:
            slots, copies = bucket.unpacking
            if self._sink.repeat(slots):
                copies.run(buffer)
                self._sink.flush()
                return
        for index, move in enumerate(bucket.moves):
            self.put(move, bucket.part(index, buffer))
        targets = self._slots
        number = self.flush()
        is_whole = [one.shape for one in targets] == [move.box.extent for move in bucket.moves]
        if is_whole and number is not None:
            bucket.unpacking = (
                number,
                BucketCopies(bucket, dict(enumerate(targets)), to_buffer=False),
            )

    def put_from(self, source: WeightSource, move: Move) -> None:
        """Have the box of a move within this process copied to where the sink wants it."""
        for part, slot in self._parts(move):
            view = source.view(part.name, part.box)
            if view is None:
                source.read(part.name, part.box, slot)
                self._is_whole = False
            else:
                self._slots.append(slot)
                self._tensors.append(view)
            self._moves.append(part)

    def repeat(self, source: WeightSource, delivered: DeliveredMoves) -> None:
        """Carry out moves as in an earlier push, at once if the sink gives the same slots."""
        if delivered.prepared is not None:
            slots, copies = delivered.prepared
            self.flush()
            if self._sink.repeat(slots):
                copies.run()
                self._sink.flush()
                self.delivered.append(delivered)
                return
        for move in delivered.moves:
            self.put_from(source, move)

    def flush(self) -> int | None:
        """Copy everything that waits, and have the sink use it; return its number for `repeat`."""
        copies = Copies(self._slots, self._tensors)
        copies.run()
        slots = self._sink.flush() if self._has_slots else None
        if self._moves:
            prepared = (slots, copies) if self._is_whole and slots is not None else None
            self.delivered.append(DeliveredMoves(self._moves, prepared))
        self._slots, self._tensors, self._moves = [], [], []
        self._is_whole, self._has_slots = True, False
        return slots

    def _parts(self, move: Move) -> Iterator[tuple[Move, Tensor]]:
        """Yield the move and its slot, or smaller moves and theirs where a box is too large."""
        slot = self._slot(move)
        if slot is not None:
            yield move, slot
            return
        for box in self._sink.cut(move.name, move.box):
            part = replace(move, box=box)
            slot = self._slot(part)
            if slot is None:
                raise WeightsError(f"there is no room for {box} of '{move.name}', which was cut")
            yield part, slot

    def _slot(self, move: Move) -> Tensor | None:
        """Return the slot of a box, after a flush if there is no room before."""
        slot = self._sink.slot(move.name, move.box)
        if slot is None and self._has_slots:
            self.flush()
            slot = self._sink.slot(move.name, move.box)
        self._has_slots |= slot is not None
        return slot
