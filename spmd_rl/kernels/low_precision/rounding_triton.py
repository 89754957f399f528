"""Rounding of weights to codes and back on NVIDIA GPUs, each element read and written once."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.low_precision.unpack_triton import nearest_codes, numbers_of
from spmd_rl.types.code_format import CodeFormat

ROWS = 32  # of a program
ALIGN_BYTES = 16  # what one load of a thread takes


def encode_on_gpu(
    code_format: CodeFormat,
    values: Tensor,
    scales: Tensor,
    first_row: int,
    out: Tensor | None = None,
) -> Tensor:
    """Return the codes of rows from `first_row` on, as `block_codes.encode` does."""
    if out is None:
        shape = code_format.code_shape(tuple(values.shape))
        out = values.new_empty(shape, dtype=getattr(torch, code_format.code_dtype))
    codes = out.view(torch.uint8)
    columns = values.shape[1]
    _launch(code_format, values, scales, codes, first_row, columns, encodes=True, decodes=False)
    return out


def rounded_on_gpu(
    code_format: CodeFormat, values: Tensor, scales: Tensor, dtype: torch.dtype, first_row: int
) -> Tensor:
    """Return what the codes of rows from `first_row` on stand for, as `block_codes.rounded`."""
    out = values.new_empty(values.shape, dtype=dtype)
    columns = values.shape[1]
    _launch(code_format, values, scales, out, first_row, columns, encodes=True, decodes=True)
    return out


def round_each_on_gpu(
    code_format: CodeFormat,
    values: Sequence[Tensor],
    scales: Sequence[Tensor],
    out: Tensor,
    first_row: int,
) -> None:
    """Write what the codes of several weights stand for, as `block_codes.rounded_each`, by one
    launch. Weights and scales are contiguous.

    Shape: E values [n, K], out [E, at least n, K].
    """
    num_rows, num_columns = values[0].shape
    if not values[0].numel():
        return
    blocks = scales[0].shape[1]
    is_aligned = all(one.data_ptr() % ALIGN_BYTES == 0 for one in values)
    _round[(triton.cdiv(num_rows, ROWS) * blocks, len(values))](
        _pointers(values), _pointers(scales), out, num_rows, num_columns, num_columns, num_columns,
        first_row, blocks, out.stride(0), True, is_aligned, True, True,
        ROWS, code_format.block_columns, code_format.block_rows, code_format.bits,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def decode_on_gpu(
    code_format: CodeFormat, codes: Tensor, scales: Tensor, num_columns: int
) -> Tensor:
    """Return what a whole weight stands for, in bf16."""
    out = codes.new_empty(len(codes), num_columns, dtype=torch.bfloat16)
    packed = codes.view(torch.uint8)
    _launch(code_format, packed, scales, out, 0, num_columns, encodes=False, decodes=True)
    return out


def _pointers(tensors: Sequence[Tensor]) -> Tensor:
    """Return a table of addresses on the device. Queues a copy and does not wait."""
    table = torch.tensor([one.data_ptr() for one in tensors], dtype=torch.int64)
    device = tensors[0].device
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)


def _launch(
    code_format: CodeFormat,
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
        blocks, 0, False, False, encodes, decodes,
        ROWS, code_format.block_columns, code_format.block_rows, code_format.bits,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "first_row"])
def _round(
    given, scales, out, num_rows, num_columns, stride, out_stride, first_row, blocks,
    out_of_one, SEVERAL: tl.constexpr, ALIGNED: tl.constexpr,
    ENCODES: tl.constexpr, DECODES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BITS: tl.constexpr,
) -> None:  # fmt: skip
    WIDTH: tl.constexpr = BLOCK * BITS // 8  # bytes of a row of a block
    if SEVERAL:  # `given` and `scales` are tables of weights and of their scales, all float32
        number = tl.program_id(1)
        given = tl.load(given + number).to(tl.pointer_type(tl.float32))
        given = tl.multiple_of(given, 16) if ALIGNED else given
        scales = tl.load(scales + number).to(tl.pointer_type(tl.float32))
        out += number.to(tl.int64) * out_of_one
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
