"""MergedSource: the source of a push whose weights are made of a base and its adapters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spmd_rl.model.linear import merged
from spmd_rl.model.lora import A, B
from spmd_rl.weights.local_tensors import LocalTensors
from spmd_rl.weights.plan.layout import Box, Layout
from spmd_rl.weights.tensor_ends import TensorSource


class MergedSource:
    """Implements `ends.WeightSource` over a base, and adapters that learn beside it.

    A weight with an adapter is base + scale * B A in float32, and is rounded once. It is made when
    it is read, so that no other weight is in memory twice. `base` and `adapters` are this rank's
    rows. `gather` returns a parameter whose rows are sharded; all that have some call it in each
    `open`. `on_open` is called before each push.
    """

    def __init__(
        self,
        base: LocalTensors,
        adapters: LocalTensors,
        scale: float,
        gather: Callable[[str], Tensor],
        on_open: Callable[[], None],
    ) -> None:
        self._base = base
        self._adapters = adapters
        self._scale = scale
        self._gather = gather
        self._on_open = on_open
        self._plain = TensorSource(base.items())
        self._a: dict[str, Tensor] = {}  # whole, by the names of the layers

    def layout(self, rank: int) -> Layout:
        return self._base.layout(rank)

    @torch.no_grad()
    def open(self) -> None:
        """Gather A of each adapter, as the rows of a weight need all of it."""
        self._on_open()
        ending = f".{A}.weight"
        self._a = {
            name.removesuffix(ending): self._gather(name).detach()
            for name in self._adapters
            if name.endswith(ending)
        }

    def view(self, name: str, box: Box) -> Tensor | None:
        return None if self._is_adapted(name) else self._plain.view(name, box)

    @torch.no_grad()
    def read(self, name: str, box: Box, out: Tensor) -> None:
        """Write `box` to `out`. All rows of this rank are made, so that any box has their bits."""
        if not self._is_adapted(name):
            self._plain.read(name, box, out)
            return
        layer, held = name.removesuffix(".weight"), self._base[name]
        b = self._adapters[f"{layer}.{B}.weight"].local
        whole = merged(held.local, self._a[layer], b, self._scale)
        out.copy_(whole[box.within(held.box)])

    def _is_adapted(self, name: str) -> bool:
        return f"{name.removesuffix('.weight')}.{B}.weight" in self._adapters
