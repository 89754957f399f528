"""64-bit hash of every row's bits, to compare two forward passes without keeping either.

A row's hash is the sum, modulo 2**64, of mix(column, bits) over its elements. It is a function of
the row's bits, in any layout and any order of threads. bfloat16 is hashed as the equal float32, so
equal numbers of the two dtypes agree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.kernels.runtime.splitmix import GAMMA, ODD, mix_, signed

CHUNK_ELEMENTS = 1 << 22


def row_hashes(x: Tensor) -> Tensor:
    """Return each row's hash, without host synchronisation, so that a CUDA graph can hold it.

    Shape: x [M, C] fp32 or bf16; returns [M] int64.
    """
    if x.is_cuda:
        from spmd_rl.kernels.rowwise.row_hash_triton import row_hashes as on_gpu

        return on_gpu(x)
    step = max(1, CHUNK_ELEMENTS // x.shape[1])
    keys = torch.arange(1, x.shape[1] + 1, device=x.device) * signed(GAMMA)
    return torch.cat([_hash(part, keys) for part in x.split(step)]) if len(x) else keys.new_zeros(0)


def write_row_hashes(x: Tensor, rows: Tensor, table: Tensor) -> None:
    """Write the hash of each row i of `x` to `table[rows[i]]`; a single launch on NVIDIA GPUs.

    Shape: x [M, C] fp32 or bf16, rows [M] int64, table [N] int64.
    """
    if x.is_cuda:
        from spmd_rl.kernels.rowwise.row_hash_triton import write_row_hashes as on_gpu

        on_gpu(x, rows, table)
    else:
        table.index_copy_(0, rows, row_hashes(x))


def wide_bits(x: Tensor) -> Tensor:
    """Return the bits of `x` as float32, in int32."""
    x = x.contiguous()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).to(torch.int32) << 16
    return x.float().view(torch.int32)


def _hash(x: Tensor, keys: Tensor) -> Tensor:
    return mix_(keys + wide_bits(x).to(torch.int64) * signed(ODD)).sum(1)
