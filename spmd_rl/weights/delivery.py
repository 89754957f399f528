"""Delivery of boxes into a sink: batched copies, and flushes where the sink has no more room."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from spmd_rl.errors import WeightsError
from spmd_rl.weights.ends import WeightSink, WeightSource
from spmd_rl.weights.plan import Move


@dataclass(frozen=True)
class DeliveredMoves:
    """Moves within one process between two flushes of its sink.

    Where they can be repeated at once, `prepared` holds the sink's number for their slots, and
    their copies.
    """

    moves: Sequence[Move]
    prepared: tuple[int, Copies] | None = None


class Delivery:
    """Puts boxes into one sink. Tensors that wait to be copied are kept until `copy`.

    `delivered` are the moves of this process that were flushed, for `repeat` in the next push.
    """

    def __init__(self, sink: WeightSink) -> None:
        self._sink = sink
        self._slots: list[Tensor] = []
        self._tensors: list[Tensor] = []
        self._has_slots = False  # some were given since the last flush
        self._moves: list[Move] = []  # of `put_from` since the last flush
        self._is_whole = True  # these are all boxes since then, and the next `copy` copies them
        self.delivered: list[DeliveredMoves] = []

    def put(self, move: Move, tensor: Tensor) -> None:
        """Have `tensor`, which holds the box of a move, copied to where the sink wants it."""
        for part, slot in self._parts(move):
            self._slots.append(slot)
            self._tensors.append(tensor[part.box.within(move.box)])
            self._is_whole = False

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

    def copy(self) -> Copies:
        """Copy everything that waits."""
        copies = Copies(self._slots, self._tensors)
        copies.run()
        self._is_whole &= not self._slots
        self._slots, self._tensors = [], []
        return copies

    def flush(self) -> None:
        """Copy everything that waits, and have the sink use it."""
        is_whole = self._is_whole
        copies = self.copy()
        slots = self._sink.flush() if self._has_slots else None
        if self._moves:
            prepared = (slots, copies) if is_whole and slots is not None else None
            self.delivered.append(DeliveredMoves(self._moves, prepared))
        self._moves, self._is_whole, self._has_slots = [], True, False

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


class Copies:
    """Copies of each tensor to its target, with a cast where dtypes differ; few launches on a GPU.

    They are prepared once and may run many times: both sides are kept, and have to keep their
    memory. torch copies a list at once where all pairs have the same two dtypes, and equal strides.
    Masters become bfloat16 in a kernel of ours.
    """

    def __init__(self, targets: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        self._runs: list[Callable[[], object]] = []
        lists: dict[tuple[object, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for target, tensor in zip(targets, tensors, strict=True):
            same_strides = target.stride() == tensor.stride()
            if target.device == tensor.device and same_strides:
                lists[target.device, target.dtype, tensor.dtype].append((target, tensor))
            else:
                self._runs.append(partial(target.copy_, tensor))
        for pairs in lists.values():
            rest = self._add_masters(pairs) if pairs[0][0].is_cuda else pairs
            if rest:
                of_list = [target for target, _ in rest], [tensor for _, tensor in rest]
                self._runs.append(partial(torch._foreach_copy_, *of_list))

    def run(self) -> None:
        """Copy everything. On a GPU, the copies are queued on the current stream."""
        for run in self._runs:
            run()

    def _add_masters(self, pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Have our kernel copy the pairs that it takes; return the others."""
        from spmd_rl.kernels.runtime import copy_triton

        fits = [copy_triton.can_copy(*pair) for pair in pairs]
        if any(fits):
            masters = [pair for pair, fit in zip(pairs, fits, strict=True) if fit]
            self._runs.append(copy_triton.MasterCopies(masters).run)
        return [pair for pair, fit in zip(pairs, fits, strict=True) if not fit]


def copy_all(targets: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy each tensor to its target."""
    Copies(targets, tensors).run()
