"""Recomputation of cheap ops' outputs in the backward pass, instead of keeping them.

Norms, rotary positions and activations cost little time and most of a layer's memory. Each such op
registers how its output is made. Within `recomputing`, autograd keeps that recipe in place of the
output. What the recipe reads is kept anyway, for the op's own gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

Recipe = Callable[[], Sequence[Tensor]]


class _Recomputation:
    """A recipe, and its outputs while some of them are still to be fetched."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.num_waiting = 0
        self.outputs: Sequence[Tensor] = ()

    def fetch(self, part: int, shape: torch.Size) -> Tensor:
        if not self.outputs:
            with torch.no_grad():
                self.outputs = self.recipe()
        tensor = self.outputs[part].view(shape)
        self.num_waiting -= 1
        if self.num_waiting <= 0:
            self.outputs = ()
        return tensor


class _Recorder:
    """The registered outputs, kept alive so that their addresses identify them."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []
        self.recipes: dict[tuple[int, int], tuple[_Recomputation, int]] = {}

    def note(self, outputs: Sequence[Tensor], recipe: Recipe) -> None:
        recomputation = _Recomputation(recipe)
        for part, output in enumerate(outputs):
            self.outputs.append(output)
            self.recipes[output.data_ptr(), output.numel()] = recomputation, part

    def forget(self) -> None:
        self.outputs.clear()
        self.recipes.clear()

    def pack(self, tensor: Tensor) -> Tensor | tuple[_Recomputation, int, torch.Size]:
        found = (
            self.recipes.get((tensor.data_ptr(), tensor.numel()))
            if tensor.is_contiguous()
            else None
        )
        if found is None:
            return tensor
        found[0].num_waiting += 1
        return *found, tensor.shape


def _unpack(packed: Tensor | tuple[_Recomputation, int, torch.Size]) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    recomputation, part, shape = packed
    return recomputation.fetch(part, shape)


_recorder: _Recorder | None = None


def recomputable(outputs: Sequence[Tensor], recipe: Recipe) -> None:
    """Register `recipe`, which makes these outputs again; they must be contiguous."""
    if _recorder is not None:
        _recorder.note(outputs, recipe)


@contextmanager
def recomputing() -> Iterator[None]:
    """Within, keep no recomputable outputs for the backward pass.

    Best around one layer: the outputs live until its end.
    """
    global _recorder
    outer, _recorder = _recorder, (recorder := _Recorder())
    try:
        with torch.autograd.graph.saved_tensors_hooks(recorder.pack, _unpack):
            yield
    finally:
        _recorder = outer
        recorder.forget()  # packed tensors keep the hooks alive, and so the recorder
