"""Sums of a train step's metrics: kept on the device in float64, and gathered once a step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.mesh.role_context import RoleContext


class MetricSums:
    """Named sums and maxima over tokens. Every rank uses the same names."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor) -> None:
        """Add one metric's value of each token to its sum."""
        self.add_each({name: values})

    def add_each(self, metrics: Mapping[str, Tensor]) -> None:
        """Add several metrics of equal length, which costs the host as much as one.

        The names must be the same in every call.
        Shape: each [M], of numbers that float32 holds.
        """
        names = tuple(metrics)
        rows = torch.stack([values.detach().float() for values in metrics.values()])
        totals = rows.sum(1, dtype=torch.float64)
        self._sums[names] = self._sums[names] + totals if names in self._sums else totals

    def add_maximum(self, name: str, values: Tensor) -> None:
        """Keep the largest of `values`, which are not negative."""
        zero = values.new_zeros(1, dtype=torch.float64)
        top = torch.cat([values.detach().double(), zero]).max()
        self._maxima[name] = torch.maximum(self._maxima[name], top) if name in self._maxima else top

    def gather(self, context: RoleContext, **numbers: float) -> dict[str, NDArray[np.float64]]:
        """Return each name's value on each shard of the data, and each of `numbers` on each rank.

        `numbers` are further names, with the values of this rank alone. The ranks of a shard have
        the same sums, of which the first rank's count.
        Ranks: all of the role. Blocks: until each has called.
        Shape: arrays of [shards] and of [ranks], in this order, so that sums have a fixed order.
        """
        by_name = self._own_values()
        names = sorted(by_name)
        table = np.zeros((len(names) + len(numbers), context.size))
        table[:, context.rank] = [*(by_name[name] for name in names), *numbers.values()]
        rows = context.all_reduce_sum(table)
        placement = context.placement
        firsts = [placement.ranks.index(ranks[0]) for ranks in placement.shards]
        sums = dict(zip(names, rows[: len(names), firsts], strict=True))
        return sums | dict(zip(numbers, rows[len(names) :], strict=True))

    def _own_values(self) -> dict[str, float]:
        """Return the sums and maxima of this rank, copied from the device all at once."""
        names = [*(name for group in self._sums for name in group), *self._maxima]
        parts = [*self._sums.values(), *(value.reshape(1) for value in self._maxima.values())]
        values = torch.cat(parts).tolist() if parts else []
        return dict(zip(names, values, strict=True))
