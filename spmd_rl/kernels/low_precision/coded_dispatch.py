"""Dispatch of products with a weight in few bits on NVIDIA GPUs; all ways have the same bits.

With few rows of x, memory sets the time, so codes are decoded in registers. With many rows a
bfloat16 copy of the weight is made first, which costs little beside its product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.kernels.linear.dispatch import has_wgmma, matmul
from spmd_rl.kernels.linear.tiles import SHARED_ROWS, choose_tile
from spmd_rl.kernels.linear.triton_gemm import matmul_into
from spmd_rl.kernels.low_precision import rounding_triton
from spmd_rl.kernels.low_precision.block_codes import BlockCodes
from spmd_rl.kernels.low_precision.coded_gemm import (
    MOST_ROWS,
    choose_warp_tile,
    warp_matmul_into,
)
from spmd_rl.kernels.low_precision.coded_gemm_triton import (
    COPY_UNIT,
    CodedTile,
    coded_matmul_into,
)
from spmd_rl.kernels.runtime.nvrtc import has_bindings
from spmd_rl.kernels.runtime.padding import dense

# Row bucket: tiles for weights up to so many rows, or more.
TILES: dict[int, tuple[CodedTile, CodedTile]] = {
    16: (CodedTile(16, 64, 128, 4, 8), CodedTile(16, 64, 128, 4, 5)),
    32: (CodedTile(32, 64, 128, 4, 8), CodedTile(32, 64, 128, 4, 5)),
    64: (CodedTile(64, 64, 128, 4, 6), CodedTile(64, 128, 128, 8, 4)),
    128: (CodedTile(128, 64, 128, 4, 4), CodedTile(128, 128, 128, 8, 4)),
}
WIDE = 8192  # rows of a weight from which there are tiles enough for all multiprocessors
# Up to so many rows of x a kernel may read a weight before an earlier kernel has ended. So the copy
# of a weight has a product that waits.
EARLY_ROWS = SHARED_ROWS.stop - 1


def coded_matmul(x: Tensor, weight: BlockCodes, bias: Tensor | None) -> Tensor:
    """Return x @ decoded weight.T + bias with fp32 accumulators and one rounding.

    Shape: x [M, K] bf16, weight [N, K], bias [N] bf16; returns [M, N] bf16.
    """
    (n, k), x = weight.shape, dense(x)
    decodes_in_registers = 0 < len(x) <= MOST_ROWS and k % COPY_UNIT == 0 and _fits(x, weight.codes)
    if decodes_in_registers and has_wgmma(x.device) and has_bindings():
        out = x.new_empty(len(x), n)
        warp_matmul_into(out, x, weight, bias, choose_warp_tile(len(x), n))
        return out
    coded_tile = choose_coded_tile(len(x), n)
    if decodes_in_registers and coded_tile is not None:
        out = x.new_empty(len(x), n)
        coded_matmul_into(out, x, weight, bias, coded_tile)
        return out
    decoded = decode_on_gpu(weight)
    if len(x) > EARLY_ROWS or not len(x):
        return matmul(x, decoded, bias, torch.bfloat16)
    out = x.new_empty(len(x), n)
    matmul_into(out, x, decoded, bias, choose_tile(len(x), n))
    return out


def _fits(x: Tensor, codes: Tensor) -> bool:
    """Return whether both can be copied in units of 16 bytes."""
    return codes.is_contiguous() and all(one.data_ptr() % COPY_UNIT == 0 for one in (x, codes))


def decode_on_gpu(weight: BlockCodes) -> Tensor:
    """Return what a whole weight stands for, in bf16."""
    codes, scales = weight.codes, weight.scales
    return rounding_triton.decode_on_gpu(weight.format, codes, scales, weight.num_columns)


def choose_coded_tile(m: int, n: int) -> CodedTile | None:
    """Return the tile for a weight of n rows; None where a copy is faster, or there is no row."""
    pair = next((pair for rows, pair in TILES.items() if 0 < m <= rows), None)
    return None if pair is None else pair[n >= WIDE]
