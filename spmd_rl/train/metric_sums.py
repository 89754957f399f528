"""The sums of a train step: kept on the device in float64, fetched once, and shown for every rank."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.mesh.role_context import RoleContext


class MetricSums:
    """Named sums and maxima over tokens; every rank uses the same names."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor) -> None:
        self.add_each({name: values})

    def add_each(self, named: Mapping[str, Tensor]) -> None:
        """Several of one length in one sum, which takes the host as long as one; the same names
        whenever it is called.

        Shape: each [M], of numbers that float32 holds.
        """
        names = tuple(named)
        totals = torch.stack([values.detach().float() for values in named.values()]).sum(
            1, dtype=torch.float64
        )
        self._sums[names] = self._sums[names] + totals if names in self._sums else totals

    def raise_to(self, name: str, values: Tensor) -> None:
        """Keep the largest of `values`, which are not negative."""
        top = torch.cat([values.detach().double(), values.new_zeros(1, dtype=torch.float64)]).max()
        self._maxima[name] = torch.maximum(self._maxima[name], top) if name in self._maxima else top

    def gather(self, context: RoleContext, **numbers: float) -> dict[str, NDArray[np.float64]]:
        """Each name's value on each rank of the role; `numbers` are more names, with this rank's
        values.

        Ranks: all of the role. Blocks: until each has called.
        Shape: arrays of [ranks], in rank order, so that a sum over them has a fixed order.
        """
        names = [*(name for group in self._sums for name in group), *self._maxima]
        parts = [*self._sums.values(), *(value.reshape(1) for value in self._maxima.values())]
        found = dict(zip(names, torch.cat(parts).tolist() if parts else [], strict=True))
        names = sorted(found)
        own = [found[name] for name in names]
        table = np.zeros((len(names) + len(numbers), context.size))
        table[:, context.rank] = [*own, *numbers.values()]
        return dict(zip([*names, *numbers], context.all_reduce_sum(table), strict=True))
