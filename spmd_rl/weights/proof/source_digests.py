"""Digests of the boxes that a source gives, each cast to the dtype that is pushed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spmd_rl.kernels.runtime.upload import upload
from spmd_rl.weights.ends import LocalEnds, WeightSource
from spmd_rl.weights.local_tensors import LocalTensor
from spmd_rl.weights.plan.layout import Box
from spmd_rl.weights.proof.digest import BoxSums, box_sums

BoxKey = tuple[str, Box, str]  # name, box and dtype


class SourceDigests:
    """The boxes of one rank's source that are digested at every comparison, numbered from 0."""

    def __init__(self, ends: LocalEnds) -> None:
        self._device = ends.device
        self._source = ends.source
        layout = None if ends.source is None else ends.source.layout(ends.rank)
        self._shapes = {piece.name: piece.shape for piece in layout.pieces} if layout else {}
        self._numbers: dict[BoxKey, int] = {}
        # the boxes in memory, once all numbers are given
        self._prepared: tuple[list[BoxKey], BoxSums] | None = None

    def number(self, key: BoxKey) -> int:
        """Return the number of a box, which is the next one if it is new."""
        return self._numbers.setdefault(key, len(self._numbers))

    def sums(self) -> Tensor:
        """Return the digest of each box, by number. Shape: [number of boxes] int64."""
        if self._source is None:
            return torch.zeros(0, dtype=torch.int64, device=self._device)
        self._prepared = self._prepared or self._prepare(self._source)
        direct, of_direct = self._prepared
        of_views = of_direct.run().to(self._device)
        if len(direct) == len(self._numbers):
            return of_views
        sums = torch.zeros(len(self._numbers), dtype=torch.int64, device=self._device)
        sums[index_of([self._numbers[key] for key in direct], self._device)] = of_views
        for key in self._numbers.keys() - set(direct):
            sums[self._numbers[key]] = self._read_sum(self._source, key)
        return sums

    def _prepare(self, source: WeightSource) -> tuple[list[BoxKey], BoxSums]:
        """Return the boxes that the source has in memory, and their digests."""
        views = {key: self._view(source, key) for key in self._numbers}
        held = {key: view for key, view in views.items() if view is not None}
        return list(held), BoxSums(list(held.values()), [dtype for _, _, dtype in held])

    def _view(self, source: WeightSource, key: BoxKey) -> LocalTensor | None:
        name, box, _ = key
        view = source.view(name, box)
        return None if view is None else LocalTensor(self._shapes[name], box, view)

    def _read_sum(self, source: WeightSource, key: BoxKey) -> Tensor:
        """Return the digest of a box that the source has to make."""
        name, box, dtype = key
        out = torch.empty(box.extent, dtype=getattr(torch, dtype), device=self._device)
        source.read(name, box, out)
        return box_sums([LocalTensor(self._shapes[name], box, out)], [dtype])[0]


def index_of(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return an index for tensors on a device."""
    return upload(np.array(numbers, dtype=np.int64), device)
