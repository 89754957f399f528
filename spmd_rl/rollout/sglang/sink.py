"""Sink of weights of an SGLang engine: through a slab on the GPU into the child's parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from spmd_rl.errors import DeadlineError, LostRankError, SpmdError, WeightsError
from spmd_rl.rollout.sglang.child_calls import ATTACH, DIGEST, RECEIVE
from spmd_rl.rollout.sglang.launch import Child
from spmd_rl.rollout.sglang.messages import PushedPieces, WeightDigests
from spmd_rl.weights.plan.layout import ITEM_BYTES, Box, Dims, Layout, Piece
from spmd_rl.weights.slab.portion_writer import PortionWriter
from spmd_rl.weights.slab.portions import cut_box
from spmd_rl.weights.slab.slab import Slab


class PushedEngine(Protocol):
    """What the sink tells its engine."""

    def open_push(self) -> None: ...

    def commit_push(self, version: int) -> None: ...


class SchedulerCalls(Protocol):
    """Calls of methods of the scheduler."""

    def start_call(self, method: str) -> None: ...

    def finish_call(self, method: str, deadline_s: float) -> None: ...


class SglangSink:
    """Implements `weights.ends.WeightSink`: the engine wants its box of each tensor, in one dtype.

    The slab is made at the first push, when the memory that it takes is known to be there.
    """

    def __init__(
        self,
        engine: PushedEngine,
        child: Child,
        calls: SchedulerCalls,
        shapes: Mapping[str, Dims],
        boxes: Mapping[str, Box],
        dtype: str,
        device: torch.device,
        *,
        slab_bytes: int,
        deadline_s: float,
    ) -> None:
        self._engine = engine
        self._child = child
        self._calls = calls
        self._pieces = {
            name: Piece(name, shape, dtype, boxes[name])
            for name, shape in shapes.items()
            if boxes[name].num_elements
        }
        self._dtype = dtype
        self._device = device
        self._slab_bytes = slab_bytes
        self._deadline_s = deadline_s
        self._writer: PortionWriter | None = None
        self._receives = False  # the child reads portions

    def layout(self, rank: int) -> Layout:
        return Layout(rank, tuple(self._pieces.values()))

    def share(self, name: str, box: Box, memory: Tensor) -> bool:
        """Return False: the child has memory of its own."""
        return False

    def outdate(self) -> None:
        """Do nothing: the child's memory is never shared."""

    def open(self) -> None:
        """Have the engine keep its requests. A push that was given up is ended first.

        Blocks: in the first push, until the schedulers of all ranks of the group have been told
        what will come. So all ranks of the group open a push together.
        """
        if self._receives:
            with contextlib.suppress(WeightsError):  # it brought only a part
                self._finish()
        self._engine.open_push()
        if self._writer is None:
            self._writer = self._attach()

    def slot(self, name: str, box: Box) -> Tensor | None:
        writer = self._receiving()
        if box.num_elements * ITEM_BYTES[self._dtype] > writer.max_bytes:
            return None
        return writer.slot(name, box, self._pieces[name].shape, self._dtype)

    def cut(self, name: str, box: Box) -> Iterable[Box]:
        return cut_box(box, ITEM_BYTES[self._dtype], self._receiving().max_bytes)

    def flush(self) -> int | None:
        return self._receiving().flush()

    def repeat(self, slots: int) -> bool:
        return self._receiving().repeat(slots)

    def digest(self) -> dict[tuple[str, Box], int]:
        """Return the digests of what the child's parameters hold. Blocks: until it has answered."""
        self._finish()
        self._calls.start_call(DIGEST)
        answer = self._child.socket.receive(self._deadline_s)
        self._calls.finish_call(DIGEST, self._deadline_s)
        if not isinstance(answer, WeightDigests):
            raise WeightsError(f"{self._child.name} sent no digests of its weights")
        return {(name, box): value for name, box, value in answer.digests}

    def commit(self, version: int) -> None:
        """Generate with the new weights as `version`. Blocks: until the child has them all."""
        self._finish()
        self._engine.commit_push(version)

    def _receiving(self) -> PortionWriter:
        """Return the writer of portions, once the child has been told to read them."""
        if self._writer is None:
            raise WeightsError("a push has to be opened before it brings weights")
        if not self._receives:
            self._calls.start_call(RECEIVE)
            self._receives = True
        return self._writer

    def _attach(self) -> PortionWriter:
        """Make the slab, and have the child map it and learn which tensors will come."""
        total = sum(piece.box.num_elements for piece in self._pieces.values())
        wanted = 2 * total * ITEM_BYTES[self._dtype] + 2 * len(self._pieces) * 256
        slab = Slab.create(min(self._slab_bytes, wanted), self._device)
        self._calls.start_call(ATTACH)
        self._child.socket.send(PushedPieces(list(self._pieces.values())))
        slab.send(self._child.socket)
        self._calls.finish_call(ATTACH, self._deadline_s)
        return PortionWriter(slab, self._child.socket, self._deadline_s)

    def _finish(self) -> None:
        """Wait until the child has loaded all portions of this push."""
        if self._receives and self._writer is not None:
            try:
                self._writer.finish()
            finally:
                self._receives = False
            try:
                self._calls.finish_call(RECEIVE, self._deadline_s)
            except (DeadlineError, LostRankError):
                raise
            except SpmdError as error:
                raise WeightsError(str(error)) from error
