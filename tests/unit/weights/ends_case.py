"""Ends of pushes within one process, for the tests beside this."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from spmd_rl.weights.ends import LocalEnds, WeightSink, WeightSource
from spmd_rl.weights.local_tensors import LocalTensor, LocalTensors
from spmd_rl.weights.plan.layout import Box, Layout
from spmd_rl.weights.plan.moves import WeightPlan, plan_moves
from spmd_rl.weights.slab.portions import cut_box
from spmd_rl.weights.tensor_ends import TensorSink, TensorSource

CPU = torch.device("cpu")


def whole(tensors: Mapping[str, Tensor]) -> list[tuple[str, LocalTensor]]:
    return list(LocalTensors.whole(tensors).items())


def part(name: str, tensor: Tensor, box: Box) -> tuple[str, LocalTensor]:
    """A piece of a tensor, in memory of its own."""
    index = tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))
    return name, LocalTensor(tuple(tensor.shape), box, tensor[index].clone())


def sink_of(pieces: Iterable[tuple[str, LocalTensor]]) -> TensorSink:
    """A sink of an engine that notes nothing."""
    return TensorSink(pieces, lambda: None, lambda version: None)


def ends_of(source: WeightSource, sink: WeightSink) -> LocalEnds:
    return LocalEnds(0, source, sink, CPU)


def ends_over(source: Mapping[str, Tensor], engine: Mapping[str, Tensor]) -> LocalEnds:
    return ends_of(TensorSource(whole(source)), sink_of(whole(engine)))


def plan_of(ends: LocalEnds) -> WeightPlan:
    return plan_moves([ends.the_source().layout(0)], [ends.the_sink().layout(0)], None, 0)


class ReadSource(TensorSource):
    """A source whose memory nobody may look at, as one that fuses its weights."""

    def view(self, name: str, box: Box) -> None:
        return None


class CountingSource(TensorSource):
    """A source that counts how often it is asked for memory."""

    num_views = 0

    def view(self, name: str, box: Box) -> Tensor | None:
        self.num_views += 1
        return super().view(name, box)


class PortionSink:
    """A sink of portions: tensors take effect at the flush, in one small buffer of their own.

    A box that is larger than the buffer has to be cut. With `keeps_slots`, the slots of each flush
    are given again, except those that are `lost`. `last` are the numbers of the flushes of a push.
    """

    def __init__(
        self, engine: Mapping[str, Tensor], num_bytes: int, keeps_slots: bool = False
    ) -> None:
        self.engine = dict(engine)
        self.keeps_slots = keeps_slots
        self.flushed: list[list[tuple[str, Box, Tensor]]] = []
        self.lost: set[int] = set()
        self.last: list[int] = []
        self._repeated: int | None = None  # the flush whose slots were given again
        self.room = self.num_bytes = num_bytes
        self.buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        self.pending: list[tuple[str, Box, Tensor]] = []
        self.events: list[str] = []
        self._target = TensorSink(whole(self.engine), lambda: None, lambda version: None)

    def layout(self, rank: int) -> Layout:
        return self._target.layout(rank)

    def share(self, name: str, box: Box, memory: Tensor) -> bool:
        return False

    def open(self) -> None:
        self.events.append("open")

    def slot(self, name: str, box: Box) -> Tensor | None:
        dtype = self.engine[name].dtype
        num_bytes = box.num_elements * dtype.itemsize
        if num_bytes > self.room:
            return None
        start = self.num_bytes - self.room
        self.room -= num_bytes
        slot = self.buffer[start : start + num_bytes].clone().view(dtype).view(box.extent)
        self.pending.append((name, box, slot))
        return slot

    def cut(self, name: str, box: Box) -> Iterable[Box]:
        self.events.append("cut")
        return cut_box(box, self.engine[name].dtype.itemsize, self.num_bytes)

    def flush(self) -> int | None:
        assert self.pending, "a flush without slots"
        for name, box, slot in self.pending:
            self._target.slot(name, box).copy_(slot)
        if self._repeated is None:
            self._repeated = len(self.flushed)
            self.flushed.append(self.pending)
        self.last.append(self._repeated)
        self.room, self.pending, self._repeated = self.num_bytes, [], None
        self.events.append("flush")
        return self.last[-1] if self.keeps_slots else None

    def repeat(self, slots: int) -> bool:
        assert not self.pending, "slots wait for a flush"
        self.events.append("repeat")
        if not self.keeps_slots or slots in self.lost:
            return False
        self.pending, self._repeated = self.flushed[slots], slots
        return True

    def digest(self) -> dict[tuple[str, Box], int]:
        assert not self.pending, "slots wait for a flush"
        return self._target.digest()

    def commit(self, version: int) -> None:
        self.events.append(f"commit {version}")
