"""Delivery of boxes into a sink: batched copies, and flushes where the sink has no more room."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

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

    def put(self, move: Move, tensor: Tensor) -> None:
        """Have `tensor`, which holds the box of a move, copied to where the sink wants it."""
        slot = self._slot(move)
        if slot is None:
            self._sink.write(move.name, move.box, tensor)
        else:
            self._slots.append(slot)
            self._tensors.append(tensor)

    def put_from(self, source: WeightSource, move: Move, device: torch.device) -> None:
        """Have the box of a move within this process copied to where the sink wants it."""
        view = source.view(move.name, move.box)
        slot = self._slot(move)
        if slot is None:
            whole = torch.empty(move.box.extent, dtype=getattr(torch, move.dtype), device=device)
            source.read(move.name, move.box, whole)
            self._sink.write(move.name, move.box, whole)
        elif view is None:
            source.read(move.name, move.box, slot)
        else:
            self._slots.append(slot)
            self._tensors.append(view)

    def copy(self) -> None:
        """Copy everything that waits."""
        copy_all(self._slots, self._tensors)
        self._slots, self._tensors = [], []

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


def copy_all(targets: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy each tensor to its target, with a cast where dtypes differ; few launches on a GPU.

    torch copies a list at once where all pairs have the same two dtypes, and equal strides. Masters
    become bfloat16 in a kernel of ours.
    """
    lists: dict[tuple[object, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for target, tensor in zip(targets, tensors, strict=True):
        same_strides = target.stride() == tensor.stride()
        if target.device == tensor.device and same_strides:
            lists[target.device, target.dtype, tensor.dtype].append((target, tensor))
        else:
            target.copy_(tensor)
    for pairs in lists.values():
        rest = _copy_masters(pairs) if pairs[0][0].is_cuda else pairs
        if rest:
            torch._foreach_copy_([target for target, _ in rest], [tensor for _, tensor in rest])


def _copy_masters(pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Copy the pairs that our kernel takes, in one launch; return the others."""
    from spmd_rl.kernels.runtime import copy_triton

    fits = [copy_triton.can_copy(*pair) for pair in pairs]
    if any(fits):
        copy_triton.copy_all([pair for pair, fit in zip(pairs, fits, strict=True) if fit])
    return [pair for pair, fit in zip(pairs, fits, strict=True) if not fit]
