"""Rounding of weights to codes and back on NVIDIA GPUs, each element read and written once."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.low_precision.code_format import BlockCodes
from spmd_rl.kernels.low_precision.unpack_triton import nearest_codes, numbers_of
from spmd_rl.types.code_layout import BLOCK, CodeLayout

ROWS = 32  # of a program


def encode_on_gpu(layout: CodeLayout, values: Tensor, scales: Tensor, first_row: int) -> Tensor:
    """Return the codes of rows from `first_row` on, as `CodeFormat.encode` does."""
    shape = layout.code_shape(tuple(values.shape))
    out = values.new_empty(shape, dtype=torch.uint8)
    _launch(layout, values, scales, out, first_row, values.shape[1], encodes=True, decodes=False)
    return out.view(getattr(torch, layout.code_dtype))


def rounded_on_gpu(
    layout: CodeLayout, values: Tensor, scales: Tensor, dtype: torch.dtype, first_row: int
) -> Tensor:
    """Return what the codes of rows from `first_row` on stand for, as `CodeFormat.rounded`."""
    out = values.new_empty(values.shape, dtype=dtype)
    _launch(layout, values, scales, out, first_row, values.shape[1], encodes=True, decodes=True)
    return out


def decode_on_gpu(weight: BlockCodes) -> Tensor:
    """Return what a whole weight stands for, in bf16."""
    out = weight.codes.new_empty(weight.shape, dtype=torch.bfloat16)
    layout, codes = weight.format.layout, weight.codes.view(torch.uint8)
    num_columns = weight.num_columns
    _launch(layout, codes, weight.scales, out, 0, num_columns, encodes=False, decodes=True)
    return out


def _launch(
    layout: CodeLayout,
    given: Tensor,
    scales: Tensor,
    out: Tensor,
    first_row: int,
    num_columns: int,
    *,
    encodes: bool,
    decodes: bool,
) -> None:
    if not given.numel():
        return
    num_rows, blocks = given.shape[0], scales.shape[1]
    _round[(triton.cdiv(num_rows, ROWS) * blocks,)](
        given, scales, out, num_rows, num_columns, given.stride(0), out.stride(0), first_row,
        blocks, encodes, decodes, ROWS, BLOCK, layout.block_rows, layout.bits,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "first_row"])
def _round(
    given, scales, out, num_rows, num_columns, stride, out_stride, first_row, blocks,
    ENCODES: tl.constexpr, DECODES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr, BITS: tl.constexpr,
) -> None:  # fmt: skip
    WIDTH: tl.constexpr = BLOCK * BITS // 8  # bytes of a row of a block
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(0) % blocks
    block_row = (first_row + tl.minimum(row, num_rows - 1)) // BLOCK_N
    scale = tl.load(scales + block_row * blocks + block).to(tl.float32)[:, None]
    at, is_row = row.to(tl.int64)[:, None], (row < num_rows)[:, None]
    byte = (block * WIDTH + tl.arange(0, WIDTH))[None, :]
    is_byte = is_row if BITS < 8 else is_row & (byte < num_columns)
    codes = tl.zeros((ROWS, WIDTH), tl.uint8)
    if not ENCODES:
        codes = tl.load(given + at * stride + byte, mask=is_byte, other=0)
    for part in tl.static_range(8 // BITS):
        column = (block * BLOCK + part * WIDTH + tl.arange(0, WIDTH))[None, :]
        is_held = is_row & (column < num_columns)
        if ENCODES:
            value = tl.load(given + at * stride + column, mask=is_held, other=0)
            codes |= nearest_codes(value * tl.div_rn(1.0, scale), BITS) << (part * BITS)
        if DECODES:
            result = numbers_of(codes, part, BITS) * scale
            tl.store(out + at * out_stride + column, result.to(out.dtype.element_ty), mask=is_held)
    if not DECODES:
        tl.store(out + at * out_stride + byte, codes, mask=is_byte)
