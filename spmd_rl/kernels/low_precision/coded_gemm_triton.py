"""GEMM in Triton whose weight is in few bits, for few rows of x on NVIDIA Hopper.

Codes are decoded in registers, so that they alone move through memory. The tensor cores get the
bfloat16 numbers that codes stand for, in one ascending chain over K, as in `linear/triton_gemm.py`.
So the bits are those of a product with the decoded weight. The decoded tile is the first operand,
which wgmma takes from registers. It serves where cuda-bindings is missing, for `coded_gemm.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from spmd_rl.kernels.low_precision.block_codes import BlockCodes
from spmd_rl.kernels.low_precision.unpack_triton import products_of, scale_offset
from spmd_rl.kernels.runtime.pdl import overlapping, wait

COPY_UNIT = 16  # columns: the copy engine moves rows of whole units of 16 bytes


class CodedTile(NamedTuple):
    """Sizes of a program: `m` rows of x, `n` rows of the weight and `k` of K in a step.

    `n` and `k` divide a block, so that a step has one scale of a row; where a byte has several
    codes, `k` is a block.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int


def coded_matmul_into(
    out: Tensor, x: Tensor, weight: BlockCodes, bias: Tensor | None, tile: CodedTile
) -> None:
    """Write x @ decoded weight.T + bias to `out`, accumulated in fp32 and rounded once.

    Shape: out [M, N] bf16 with contiguous rows, x [M, K] bf16, bias [N]. K is a multiple of
    `COPY_UNIT`.
    """
    (m, k), n = x.shape, out.shape[1]
    codes, code_format = weight.codes.view(torch.uint8), weight.format
    block, per_byte = code_format.block_columns, code_format.per_byte
    assert per_byte == 1 or tile.k == block, "a byte has codes of both halves of a block"
    part = tile.k // per_byte
    _coded_matmul[(triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n),)](
        TensorDescriptor.from_tensor(x, [tile.m, part]),
        TensorDescriptor.from_tensor(codes, [tile.n, part]),
        weight.scales, out if bias is None else bias, out, m, n, k, out.stride(0),
        bias is not None, tile.m, tile.n, tile.k, block,
        code_format.block_rows, code_format.bits,
        num_warps=tile.warps, num_stages=tile.stages, **overlapping(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["m"])
def _coded_matmul(
    x, codes, scales, bias, out, m, n, k, out_stride,
    HAS_BIAS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BITS: tl.constexpr,
) -> None:  # fmt: skip
    PER_BYTE: tl.constexpr = 8 // BITS
    tiles_m = tl.cdiv(m, TILE_M)
    first_row = (tl.program_id(0) % tiles_m) * TILE_M
    first_column = (tl.program_id(0) // tiles_m) * TILE_N
    column, row = first_column + tl.arange(0, TILE_N), first_row + tl.arange(0, TILE_M)
    blocks = tl.cdiv(k, BLOCK)
    row_scales = scales + scale_offset(first_column, column, n, blocks, BLOCK_N)
    wait()
    total = tl.zeros((TILE_N, TILE_M), tl.float32)
    scale = tl.load(row_scales)
    for start in range(0, k, TILE_K):
        # the scale of the next step is on its way while this one multiplies
        following = min((start + TILE_K) // BLOCK, blocks - 1)
        next_scale = tl.load(row_scales + following)
        packed = codes.load([first_column, start // PER_BYTE])
        for part in tl.static_range(PER_BYTE):
            values = products_of(packed, scale, part, BITS)
            rows = x.load([first_row, start + part * (TILE_K // PER_BYTE)])
            total = tl.dot(values, tl.trans(rows), total)
        scale = next_scale
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[:, None]
    at = out + row.to(tl.int64)[None, :] * out_stride + column[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=(row < m)[None, :] & (column < n)[:, None])
