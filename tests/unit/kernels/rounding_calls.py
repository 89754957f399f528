"""Calls of the kernels that round weights to codes, for Triton's interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.kernels.low_precision.block_codes import torch_dtype
from spmd_rl.kernels.low_precision.rounding_triton import (
    decode_on_gpu,
    encode_on_gpu,
    round_each_on_gpu,
    rounded_on_gpu,
)
from spmd_rl.model.formats import FORMATS


def of_rows(
    name: str, values: Tensor, scales: Tensor, first_row: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes of rows, what they stand for, and what they do where they are all rows."""
    own = FORMATS[name]
    codes = encode_on_gpu(own, values, scales, first_row)
    room = codes.new_full((len(codes) + 2, codes.shape[1] + 16), 99)
    among = encode_on_gpu(own, values, scales, first_row, room[1:-1, :-16])
    assert torch.equal(among, codes) and int((room == 99).sum()) >= room.numel() - codes.numel()
    rounded = rounded_on_gpu(own, values, scales, torch.float32, first_row)
    held = scales[first_row : first_row + len(values)].to(torch_dtype(own.scale_dtype))
    return codes, rounded, decode_on_gpu(own, codes, held, values.shape[1])


def of_several(name: str, values: Tensor, scales: Tensor, first_row: int, rows: int) -> Tensor:
    """Return what the codes of several weights stand for, and 9 beyond their rows."""
    out = values.new_full((len(values), rows, values.shape[2]), 9)
    each = [one.contiguous() for one in values], [one.contiguous() for one in scales]
    round_each_on_gpu(FORMATS[name], *each, out, first_row)
    return out
