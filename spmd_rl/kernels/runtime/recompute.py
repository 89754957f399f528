"""Outputs of cheap ops that the backward pass makes again instead of keeping.

Norms, rotary positions and activations cost little time and most of a layer's memory. Each such op
says how its output is made; within `recomputing`, whoever would keep that output for the backward pass
keeps the recipe. What the recipe reads, the op keeps for its own gradient anyhow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

Recipe = Callable[[], Sequence[Tensor]]


class _Recomputation:
    """One recipe, and what it made while somebody still has to fetch a part."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.num_waiting = 0
        self.made: Sequence[Tensor] = ()

    def fetch(self, part: int, shape: torch.Size) -> Tensor:
        if not self.made:
            with torch.no_grad():
                self.made = self.recipe()
        tensor = self.made[part].view(shape)
        self.num_waiting -= 1
        if self.num_waiting <= 0:
            self.made = ()
        return tensor


class _Recorder:
    """Holds the outputs while it records, so that their addresses name them."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []
        self.known: dict[tuple[int, int], tuple[_Recomputation, int]] = {}

    def note(self, outputs: Sequence[Tensor], recipe: Recipe) -> None:
        making = _Recomputation(recipe)
        for part, output in enumerate(outputs):
            self.outputs.append(output)
            self.known[output.data_ptr(), output.numel()] = making, part

    def forget(self) -> None:
        self.outputs.clear()
        self.known.clear()

    def pack(self, tensor: Tensor) -> Tensor | tuple[_Recomputation, int, torch.Size]:
        found = (
            self.known.get((tensor.data_ptr(), tensor.numel())) if tensor.is_contiguous() else None
        )
        if found is None:
            return tensor
        found[0].num_waiting += 1
        return *found, tensor.shape


def _unpack(packed: Tensor | tuple[_Recomputation, int, torch.Size]) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    making, part, shape = packed
    return making.fetch(part, shape)


_recorder: _Recorder | None = None


def recomputable(outputs: Sequence[Tensor], recipe: Recipe) -> None:
    """Say that `recipe` makes these outputs, contiguous tensors, again."""
    if _recorder is not None:
        _recorder.note(outputs, recipe)


@contextmanager
def recomputing() -> Iterator[None]:
    """Within, recomputable outputs are not kept for the backward pass. Best around one layer: they
    live until its end.
    """
    global _recorder
    outer, _recorder = _recorder, (recorder := _Recorder())
    try:
        with torch.autograd.graph.saved_tensors_hooks(recorder.pack, _unpack):
            yield
    finally:
        _recorder = outer
        recorder.forget()  # whatever was packed holds on to the hooks, and so to the recorder
