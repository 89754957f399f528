"""A 64-bit hash of every row's bits, so that two forward passes can be compared without keeping either.

A row's hash is the sum, modulo 2**64, of mix(column, bits) over its elements: a function of its own bits, in any layout
and any order of threads. bfloat16 is hashed as the float32 number that it is, so equal numbers of the two agree.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22


def row_hashes(x: Tensor) -> Tensor:
    """No host synchronisation: it can be captured in a CUDA graph. Shape: x [M, C] fp32 or bf16; returns [M] int64."""
    if x.is_cuda:
        from spmd_rl.kernels.row_hash_triton import row_hashes as on_gpu

        return on_gpu(x)
    step = max(1, CHUNK_ELEMENTS // x.shape[1])
    keys = torch.arange(1, x.shape[1] + 1, device=x.device) * _signed(0x9E3779B97F4A7C15)
    return torch.cat([_hash(part, keys) for part in x.split(step)]) if len(x) else keys.new_zeros(0)


def write_row_hashes(x: Tensor, rows: Tensor, table: Tensor) -> None:
    """The hash of each row i of `x` into entry `rows[i]` of `table`; on NVIDIA GPUs a single launch.

    Shape: x [M, C] fp32 or bf16, rows [M] int64, table [N] int64.
    """
    if x.is_cuda:
        from spmd_rl.kernels.row_hash_triton import write_row_hashes as on_gpu

        on_gpu(x, rows, table)
    else:
        table.index_copy_(0, rows, row_hashes(x))


def wide_bits(x: Tensor) -> Tensor:
    """The bits of `x` as float32, int32."""
    x = x.contiguous()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).to(torch.int32) << 16
    return x.float().view(torch.int32)


def _hash(x: Tensor, keys: Tensor) -> Tensor:
    """Source: the finaliser of Steele, Lea and Flood, Fast splittable pseudorandom number generators (2014)."""
    mixed = keys + wide_bits(x).to(torch.int64) * _signed(0xD1342543DE82EF95)
    mixed = (mixed ^ _shift_right(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shift_right(mixed, 27)) * _signed(0x94D049BB133111EB)
    return (mixed ^ _shift_right(mixed, 31)).sum(1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64 taken as unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
