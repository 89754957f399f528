"""Digests of tensors that add up over shards.

A tensor's digest is the sum, modulo 2**64, of mix(global index, bits) over its elements. So the digests of
disjoint boxes add up to the whole's, under any layout, and both ends of a push can compare 8 bytes a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from spmd_rl.errors import ContractError
from spmd_rl.weights.held import Held, HeldTensor
from spmd_rl.weights.layout import Box, Layout

MODULUS = 1 << 64
CHUNK_ELEMENTS = 1 << 22
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(held: Held, dtypes: Mapping[str, str] | None = None) -> dict[str, int]:
    """The digest of this rank's box of each tensor, of its values as `dtypes[name]` (the destination's) if given."""
    return {name: _digest_box(one, (dtypes or {}).get(name, one.dtype)) for name, one in held.items()}


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
def _digest_box(one: HeldTensor, dtype: str) -> int:
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
        total += int(_mix(index, part.view(_BITS[part.element_size()]).to(torch.int64)).sum())
    return total % MODULUS


def _column_indices(one: HeldTensor) -> Tensor:
    """The flat index, within one global row of dim 0, of each element of a local row. Shape: [row elements]."""
    index = torch.zeros(1, dtype=torch.int64)
    for size, offset, extent in zip(one.shape[1:], one.box.offset[1:], one.box.extent[1:], strict=True):
        index = (index.unsqueeze(1) * size + torch.arange(offset, offset + extent)).reshape(-1)
    return index


def _mix(index: Tensor, bits: Tensor) -> Tensor:
    """A 64-bit hash of each (index, bits) pair, in wrapping int64 arithmetic (the finaliser of splitmix64)."""
    x = index * _GOLDEN + bits * _ODD
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, places: int) -> Tensor:
    """Logical shift right of int64."""
    return (x >> places) & ((1 << (64 - places)) - 1)


def _signed(value: int) -> int:
    return value - MODULUS if value >= MODULUS // 2 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_ODD = _signed(0xD1342543DE82EF95)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)
