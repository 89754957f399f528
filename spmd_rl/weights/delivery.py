"""Delivery of boxes into a sink: batched copies, and flushes where the sink has no more room."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from spmd_rl.weights.ends import WeightSink, WeightSource
from spmd_rl.weights.plan import Move


class Delivery:
    """Puts boxes into one sink. Tensors that wait to be copied are kept until `copy`."""

    def __init__(self, sink: WeightSink) -> None:
        self._sink = sink
        self._slots: list[Tensor] = []
        self._tensors: list[Tensor] = []
        self._has_slots = False  # some were given since the last flush
        self._is_whole = True  # every box so far is copied by the next `copy`

    def put(self, move: Move, tensor: Tensor) -> None:
        """Have `tensor`, which holds the box of a move, copied to where the sink wants it."""
        slot = self._slot(move)
        if slot is None:
            self._is_whole = False
            self._sink.write(move.name, move.box, tensor)
        else:
            self._slots.append(slot)
            self._tensors.append(tensor)

    def put_from(self, source: WeightSource, move: Move, device: torch.device) -> None:
        """Have the box of a move within this process copied to where the sink wants it."""
        view = source.view(move.name, move.box)
        slot = self._slot(move)
        self._is_whole &= slot is not None and view is not None
        if slot is None:
            whole = torch.empty(move.box.extent, dtype=getattr(torch, move.dtype), device=device)
            source.read(move.name, move.box, whole)
            self._sink.write(move.name, move.box, whole)
        elif view is None:
            source.read(move.name, move.box, slot)
        else:
            self._slots.append(slot)
            self._tensors.append(view)

    def copy(self) -> tuple[Copies, bool]:
        """Copy everything that waits; return the copies, and whether they were all boxes so far."""
        copies, is_whole = Copies(self._slots, self._tensors), self._is_whole
        copies.run()
        self._is_whole &= not self._slots
        self._slots, self._tensors = [], []
        return copies, is_whole

    def repeat(self, copies: Copies) -> None:
        """Copy again what `copy` has copied, to a sink that keeps its slots."""
        copies.run()
        self._has_slots = True

    def flush(self) -> None:
        """Copy everything that waits, and have the sink use it."""
        self.copy()
        if self._has_slots:
            self._sink.flush()
            self._has_slots = False

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
