"""Digests of tensors that add up over shards.

A tensor's digest is the sum, modulo 2**64, of mix(global index, bits) over its elements. So the
digests of disjoint boxes add up to the whole's, under any layout, and both ends of a push can
compare 8 bytes a tensor.
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


def digest(held: LocalTensors, dtypes: Mapping[str, str] | None = None) -> dict[str, int]:
    """The digest of this rank's box of each tensor, of its values as `dtypes[name]` (the
    destination's) if given.
    """
    return {
        name: _digest_box(one, (dtypes or {}).get(name, one.dtype)) for name, one in held.items()
    }


def combine(parts: Sequence[tuple[Layout, Mapping[str, int]]]) -> dict[str, int]:
    """Digests of whole tensors from those of all ranks of one side; replicas of a box count once.

    Raises: ContractError where two replicas of a box differ.
    """
    boxes: dict[str, dict[Box, int]] = {}
    for layout, digests in parts:
        for piece in layout.pieces:
            seen = boxes.setdefault(piece.name, {})
            value = seen.setdefault(piece.box, digests[piece.name])
            if value != digests[piece.name]:
                raise ContractError(
                    f"replicas of tensor '{piece.name}' hold different bytes (seen on rank {layout.rank})"
                )
    return {name: sum(values.values()) % MODULUS for name, values in boxes.items()}


@torch.no_grad()
def _digest_box(one: LocalTensor, dtype: str) -> int:
    if one.box.num_elements == 0:
        return 0
    columns = _column_indices(one).to(one.local.device)
    rows = one.local.detach().reshape(-1, len(columns))
    first_row = one.box.offset[0] if one.shape else 0
    step = max(1, CHUNK_ELEMENTS // len(columns))
    total = 0
    for start in range(0, rows.shape[0], step):
        part = rows[start : start + step].to(getattr(torch, dtype))
        row = torch.arange(first_row + start, first_row + start + len(part), device=part.device)
        index = row.unsqueeze(1) * prod(one.shape[1:]) + columns
        bits = part.view(_BITS[part.element_size()]).to(torch.int64)
        total += int(mix_(index * signed(GAMMA) + bits * signed(ODD)).sum())
    return total % MODULUS


def _column_indices(one: LocalTensor) -> Tensor:
    """The flat index, within one global row of dim 0, of each element of a local row. Shape: [row
    elements].
    """
    index = torch.zeros(1, dtype=torch.int64)
    for size, offset, extent in zip(
        one.shape[1:], one.box.offset[1:], one.box.extent[1:], strict=True
    ):
        index = (index.unsqueeze(1) * size + torch.arange(offset, offset + extent)).reshape(-1)
    return index
