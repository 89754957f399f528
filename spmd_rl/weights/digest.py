"""Digests of tensors that add up over shards.

A tensor's digest is the sum, modulo 2**64, of mix(global index, bits) over its elements. The
digests of disjoint boxes therefore add up to that of the whole tensor under any layout. Both ends
of a push can compare 8 bytes a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from spmd_rl.errors import ContractError
from spmd_rl.kernels.runtime.splitmix import GAMMA, ODD, mix_, signed
from spmd_rl.weights.layout import Box, Layout
from spmd_rl.weights.local_tensors import LocalTensor, LocalTensors

MODULUS = 1 << 64
CHUNK_ELEMENTS = 1 << 22
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensors: LocalTensors, dtypes: Mapping[str, str] | None = None) -> dict[str, int]:
    """Return the digest of this rank's box of each tensor.

    Where `dtypes` names a dtype for a tensor, its values are cast to that first, as a push does.
    """
    casts = dtypes or {}
    return {
        name: _digest_box(tensor, casts.get(name, tensor.dtype)) for name, tensor in tensors.items()
    }


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


@torch.no_grad()
def _digest_box(tensor: LocalTensor, dtype: str) -> int:
    if tensor.box.num_elements == 0:
        return 0
    columns = _column_indices(tensor).to(tensor.local.device)
    rows = tensor.local.detach().reshape(-1, len(columns))
    row_size = prod(tensor.shape[1:])
    first_row = tensor.box.offset[0] if tensor.shape else 0
    step = max(1, CHUNK_ELEMENTS // len(columns))
    total = 0
    for start in range(0, rows.shape[0], step):
        part = rows[start : start + step].to(getattr(torch, dtype))
        row = torch.arange(first_row + start, first_row + start + len(part), device=part.device)
        index = row.unsqueeze(1) * row_size + columns
        bits = part.view(_BITS[part.element_size()]).to(torch.int64)
        total += int(mix_(index * signed(GAMMA) + bits * signed(ODD)).sum())
    return total % MODULUS


def _column_indices(tensor: LocalTensor) -> Tensor:
    """Return the flat index, within a global row of dim 0, of each element of a local row.

    Shape: [elements of a local row].
    """
    index = torch.zeros(1, dtype=torch.int64)
    box = tensor.box
    for size, offset, extent in zip(tensor.shape[1:], box.offset[1:], box.extent[1:], strict=True):
        index = (index.unsqueeze(1) * size + torch.arange(offset, offset + extent)).reshape(-1)
    return index
