"""Digests of tensors that add up over shards.

A tensor's digest is the sum, modulo 2**64, of mix(global index, bits) over its elements. The
digests of disjoint boxes therefore add up to that of the whole tensor under any layout. Both ends
of a push can compare 8 bytes a tensor.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from spmd_rl.errors import ContractError
from spmd_rl.kernels.runtime.splitmix import GAMMA, ODD, mix_, signed
from spmd_rl.weights.local_tensors import LocalTensor, LocalTensors
from spmd_rl.weights.plan.layout import Box, Layout
from spmd_rl.weights.proof.memory_rows import memory_rows

MODULUS = 1 << 64
CHUNK_ELEMENTS = 1 << 22
SMALL_ELEMENTS = 1 << 16  # of a box whose elements have kept keys, of 8 bytes each
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensors: LocalTensors, dtypes: Mapping[str, str] | None = None) -> dict[str, int]:
    """Return the digest of this rank's box of each tensor.

    Where `dtypes` names a dtype for a tensor, its values are cast to that first, as a push does.
    """
    casts = dtypes or {}
    sums = box_sums(
        list(tensors.values()), [casts.get(name, one.dtype) for name, one in tensors.items()]
    )
    return {name: value % MODULUS for name, value in zip(tensors, sums.tolist(), strict=True)}


def base_fact(digests: Mapping[str, int]) -> dict[str, str | int]:
    """Return the fact of a numeric contract that names weights which are pushed to nobody.

    `digests` are those of whole tensors, by name.
    """
    text = "\n".join(f"{name} {value:016x}" for name, value in sorted(digests.items()))
    return {"base_weights": hashlib.sha256(text.encode()).hexdigest()[:16]}


class BoxSums:
    """Digests of boxes, each cast to the dtype beside it. They are prepared once for many times.

    The tensors are kept, and have to keep their memory. On a GPU, all boxes of the same two dtypes
    are one launch.
    """

    def __init__(self, boxes: Sequence[LocalTensor], dtypes: Sequence[str]) -> None:
        self._boxes = boxes
        self._device = boxes[0].local.device if boxes else torch.device("cpu")
        self._launches: list[Callable[[Tensor], None]] = []
        self._one_by_one: list[tuple[int, torch.dtype]] = []
        casts: dict[tuple[torch.dtype, torch.dtype], list[int]] = defaultdict(list)
        for number, (tensor, dtype) in enumerate(zip(boxes, dtypes, strict=True)):
            casts[tensor.local.dtype, getattr(torch, dtype)].append(number)
        for (held, target), numbers in casts.items():
            if self._device.type == "cuda" and self._prepare(numbers, held, target):
                continue
            small = [n for n in numbers if 0 < boxes[n].box.num_elements <= SMALL_ELEMENTS]
            if small:
                self._launches.append(_SmallBoxes(small, boxes, target).add_to)
            rest = sorted(set(numbers) - set(small))
            self._one_by_one += [(number, target) for number in rest]

    @torch.no_grad()
    def run(self) -> Tensor:
        """Return the digest of each box as a signed number, without waiting for a GPU.

        Shape: [number of boxes] int64, on the device of the boxes.
        """
        sums = torch.zeros(len(self._boxes), dtype=torch.int64, device=self._device)
        for launch in self._launches:
            launch(sums)
        for number, target in self._one_by_one:
            sums[number] = _box_sum(self._boxes[number], target)
        return sums

    def _prepare(self, numbers: Sequence[int], dtype: torch.dtype, target: torch.dtype) -> bool:
        """Have one launch add the digests of these boxes; return False if it cannot read them."""
        from spmd_rl.kernels.runtime.row_digests import RowDigests, Rows, can_digest

        if not can_digest(dtype, target):
            return False
        rows = []
        for number in numbers:
            if self._boxes[number].box.num_elements:
                of_box = memory_rows(self._boxes[number], number)
                if of_box is None:
                    return False
                rows += [Rows(*row) for row in of_box]
        if rows:
            self._launches.append(RowDigests(rows, dtype, target, self._device).add_to)
        return True


def box_sums(boxes: Sequence[LocalTensor], dtypes: Sequence[str]) -> Tensor:
    """Return the digest of each box, as `BoxSums.run` does."""
    return BoxSums(boxes, dtypes).run()


def combine(parts: Sequence[tuple[Layout, Mapping[str, int]]]) -> dict[str, int]:
    """Add up the digests of all ranks of one end to those of whole tensors.

    Replicas of a box count once.

    Raises: ContractError where two replicas of a box differ.
    """
    boxes: dict[str, dict[Box, int]] = {}
    for layout, digests in parts:
        for piece in layout.pieces:
            by_box = boxes.setdefault(piece.name, {})
            value = by_box.setdefault(piece.box, digests[piece.name])
            if value != digests[piece.name]:
                raise ContractError(
                    f"replicas of tensor '{piece.name}' hold different bytes "
                    f"(seen on rank {layout.rank})"
                )
    return {name: sum(values.values()) % MODULUS for name, values in boxes.items()}


class _SmallBoxes:
    """Digests of small boxes, computed together: the keys of their elements are kept."""

    def __init__(
        self, numbers: Sequence[int], boxes: Sequence[LocalTensor], target: torch.dtype
    ) -> None:
        self._numbers = numbers
        self._tensors = [boxes[number].local for number in numbers]
        self._target = target
        device = self._tensors[0].device
        sizes = torch.tensor([tensor.numel() for tensor in self._tensors], device=device)
        self._last = sizes.cumsum(0) - 1
        self._keys = torch.cat([_index(boxes[n]).to(device).flatten() for n in numbers])
        self._keys *= signed(GAMMA)

    def add_to(self, sums: Tensor) -> None:
        """Add the digest of each box to its number in `sums`."""
        values = torch.cat([t.detach().reshape(-1) for t in self._tensors]).to(self._target)
        bits = values.view(BITS[values.element_size()]).to(torch.int64)
        until = mix_(self._keys + bits * signed(ODD)).cumsum(0)[self._last]
        until[1:] -= until[:-1].clone()
        sums[self._numbers] += until


def _index(tensor: LocalTensor) -> Tensor:
    """Return the index in the whole tensor of each element. Shape: [rows, elements of a row]."""
    columns = _column_indices(tensor)
    first_row = tensor.box.offset[0] if tensor.shape else 0
    rows = torch.arange(first_row, first_row + tensor.box.num_elements // len(columns))
    return rows.unsqueeze(1) * prod(tensor.shape[1:]) + columns


def _box_sum(tensor: LocalTensor, dtype: torch.dtype) -> Tensor:
    device = tensor.local.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    if tensor.box.num_elements == 0:
        return total
    columns = _column_indices(tensor).to(device)
    rows = tensor.local.detach().reshape(-1, len(columns))
    row_size = prod(tensor.shape[1:])
    first_row = tensor.box.offset[0] if tensor.shape else 0
    step = max(1, CHUNK_ELEMENTS // len(columns))
    for start in range(0, rows.shape[0], step):
        part = rows[start : start + step].to(dtype)
        row = torch.arange(first_row + start, first_row + start + len(part), device=device)
        index = row.unsqueeze(1) * row_size + columns
        bits = part.view(BITS[part.element_size()]).to(torch.int64)
        total += mix_(index * signed(GAMMA) + bits * signed(ODD)).sum()
    return total


def _column_indices(tensor: LocalTensor) -> Tensor:
    """Return the flat index, within a global row of dim 0, of each element of a local row.

    Shape: [elements of a local row].
    """
    index = torch.zeros(1, dtype=torch.int64)
    box = tensor.box
    for size, offset, extent in zip(tensor.shape[1:], box.offset[1:], box.extent[1:], strict=True):
        index = (index.unsqueeze(1) * size + torch.arange(offset, offset + extent)).reshape(-1)
    return index
