"""Hashes of rows on NVIDIA GPUs: one program a row, the same integers as on the CPU."""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
GOLDEN, ODD = tl.constexpr(0x9E3779B97F4A7C15), tl.constexpr(0xD1342543DE82EF95)
MIX_1, MIX_2 = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)


def row_hashes(x: Tensor) -> Tensor:
    """Shape: x [M, C] fp32 or bf16; returns [M] int64."""
    x = x.contiguous()
    bits = x.view(torch.int16) if x.dtype == torch.bfloat16 else x.float().view(torch.int32)
    out = torch.empty(len(x), dtype=torch.int64, device=x.device)
    if len(x):
        _row_hashes[(len(x),)](bits, out, x.shape[1], 32 - 8 * bits.element_size(), BLOCK, num_warps=4)
    return out


@triton.jit
def _row_hashes(bits, out, columns, SHIFT: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        wide = tl.load(bits + row * columns + column, mask=column < columns, other=0).to(tl.int32) << SHIFT
        x = (column + 1).to(tl.uint64) * GOLDEN + wide.to(tl.int64).to(tl.uint64, bitcast=True) * ODD
        x = (x ^ (x >> 30)) * MIX_1
        x = (x ^ (x >> 27)) * MIX_2
        x = x ^ (x >> 31)
        total += tl.where(column < columns, x.to(tl.int64, bitcast=True), 0)
    tl.store(out + row, tl.sum(total, axis=0))
