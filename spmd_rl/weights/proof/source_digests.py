"""Digests of the boxes that a source gives, each cast to the dtype that is pushed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spmd_rl.kernels.runtime.upload import upload
from spmd_rl.weights.ends import LocalEnds, WeightSource
from spmd_rl.weights.local_tensors import LocalTensor
from spmd_rl.weights.plan.layout import ITEM_BYTES, Box
from spmd_rl.weights.proof.digest import BoxSums, box_sums

BoxKey = tuple[str, Box, str]  # name, box and dtype
MADE_BYTES = 1 << 28  # of boxes that are made at once, to be digested together


class Boxes(NamedTuple):
    """All boxes of a source: those that it has in memory with their digests, and groups of those
    that it makes.
    """

    held: list[BoxKey]
    sums: BoxSums
    made: list[list[BoxKey]]


class SourceDigests:
    """The boxes of one rank's source that are digested at every comparison, numbered from 0."""

    def __init__(self, ends: LocalEnds) -> None:
        self._device = ends.device
        self._source = ends.source
        layout = None if ends.source is None else ends.source.layout(ends.rank)
        self._shapes = {piece.name: piece.shape for piece in layout.pieces} if layout else {}
        self._numbers: dict[BoxKey, int] = {}
        self._prepared: Boxes | None = None  # once all numbers are given

    def number(self, key: BoxKey) -> int:
        """Return the number of a box, which is the next one if it is new."""
        return self._numbers.setdefault(key, len(self._numbers))

    def sums(self) -> Tensor:
        """Return the digest of each box, by number. Shape: [number of boxes] int64."""
        if self._source is None:
            return torch.zeros(0, dtype=torch.int64, device=self._device)
        boxes = self._prepared = self._prepared or self._prepare(self._source)
        of_views = boxes.sums.run().to(self._device)
        if not boxes.made:
            return of_views
        sums = torch.zeros(len(self._numbers), dtype=torch.int64, device=self._device)
        sums[self._index_of(boxes.held)] = of_views
        for keys in boxes.made:
            sums[self._index_of(keys)] = self._read_sums(self._source, keys)
        return sums

    def _index_of(self, keys: Sequence[BoxKey]) -> Tensor:
        return index_of([self._numbers[key] for key in keys], self._device)

    def _prepare(self, source: WeightSource) -> Boxes:
        views = {key: self._view(source, key) for key in self._numbers}
        held = {key: view for key, view in views.items() if view is not None}
        made = _groups([key for key in views if key not in held])
        sums = BoxSums(list(held.values()), [dtype for _, _, dtype in held])
        return Boxes(list(held), sums, list(made))

    def _view(self, source: WeightSource, key: BoxKey) -> LocalTensor | None:
        name, box, _ = key
        view = source.view(name, box)
        return None if view is None else LocalTensor(self._shapes[name], box, view)

    def _read_sums(self, source: WeightSource, keys: Sequence[BoxKey]) -> Tensor:
        """Return the digests of boxes that the source has to make."""
        made = []
        for name, box, dtype in keys:
            out = torch.empty(box.extent, dtype=getattr(torch, dtype), device=self._device)
            source.read(name, box, out)
            made.append(LocalTensor(self._shapes[name], box, out))
        return box_sums(made, [dtype for _, _, dtype in keys])


def _groups(keys: Sequence[BoxKey]) -> Iterator[list[BoxKey]]:
    """Yield boxes that together have at most `MADE_BYTES`, or one that has more."""
    group: list[BoxKey] = []
    num_bytes = 0
    for key in keys:
        _, box, dtype = key
        own = box.num_elements * ITEM_BYTES[dtype]
        if group and num_bytes + own > MADE_BYTES:
            yield group
            group, num_bytes = [], 0
        group.append(key)
        num_bytes += own
    if group:
        yield group


def index_of(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return an index for tensors on a device."""
    return upload(np.array(numbers, dtype=np.int64), device)
