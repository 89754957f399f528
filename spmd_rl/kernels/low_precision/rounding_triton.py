"""Rounding of weights to codes and back on NVIDIA GPUs, each element read and written once."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.low_precision.block_codes import BLOCK, CODE, BlockCodes

ROWS = 32  # of a program


def encode_on_gpu(values: Tensor, scales: Tensor, first_row: int) -> Tensor:
    """Return the codes of rows from `first_row` on, as `e4m3_blocks.encode` does."""
    out = values.new_empty(values.shape, dtype=torch.uint8)
    _launch(values, scales, out, first_row, encodes=True, decodes=False)
    return out.view(CODE)


def rounded_on_gpu(values: Tensor, scales: Tensor, dtype: torch.dtype, first_row: int) -> Tensor:
    """Return what the codes of rows from `first_row` on stand for, as `e4m3_blocks.rounded`."""
    out = values.new_empty(values.shape, dtype=dtype)
    _launch(values, scales, out, first_row, encodes=True, decodes=True)
    return out


def decode_on_gpu(weight: BlockCodes) -> Tensor:
    """Return what a whole weight stands for, in bf16."""
    out = torch.empty_like(weight.codes, dtype=torch.bfloat16)
    _launch(weight.codes.view(torch.uint8), weight.scales, out, 0, encodes=False, decodes=True)
    return out


def _launch(
    given: Tensor, scales: Tensor, out: Tensor, first_row: int, *, encodes: bool, decodes: bool
) -> None:
    num_rows, num_columns = given.shape
    if not given.numel():
        return
    blocks = scales.shape[1]
    _round[(triton.cdiv(num_rows, ROWS) * blocks,)](
        given, scales, out, num_rows, num_columns, given.stride(0), first_row, blocks,
        encodes, decodes, ROWS, BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "first_row"])
def _round(
    given, scales, out, num_rows, num_columns, stride, first_row, blocks,
    ENCODES: tl.constexpr, DECODES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(0) % blocks
    column = block * BLOCK + tl.arange(0, BLOCK)
    is_held = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    block_row = (first_row + tl.minimum(row, num_rows - 1)) // BLOCK
    scale = tl.load(scales + block_row * blocks + block)[:, None]
    at = row.to(tl.int64)[:, None]
    value = tl.load(given + at * stride + column[None, :], mask=is_held, other=0)
    if ENCODES:
        code = (value * tl.div_rn(1.0, scale)).to(tl.float8e4nv)
    else:
        code = value.to(tl.float8e4nv, bitcast=True)
    if DECODES:
        result = (code.to(tl.float32) * scale).to(out.dtype.element_ty)
    else:
        result = code.to(tl.uint8, bitcast=True)
    tl.store(out + at * num_columns + column[None, :], result, mask=is_held)
