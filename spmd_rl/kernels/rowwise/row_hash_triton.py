"""Hashes of rows on NVIDIA GPUs: one program for each row, with the CPU's integers."""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GOLDEN, ODD = tl.constexpr(0x9E3779B97F4A7C15), tl.constexpr(0xD1342543DE82EF95)
MIX_1, MIX_2 = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)


def row_hashes(x: Tensor) -> Tensor:
    """Shape: x [M, C] fp32 or bf16; returns [M] int64."""
    table = torch.empty(len(x), dtype=torch.int64, device=x.device)
    write_row_hashes(x, None, table)
    return table


def write_row_hashes(x: Tensor, rows: Tensor | None, table: Tensor) -> None:
    """Shape: x [M, C] fp32 or bf16, rows [M] int64 or the first M, table [N] int64."""
    num_rows, columns = x.shape
    x = x if x.stride(1) == 1 or columns == 1 else x.contiguous()
    bits = x.view(torch.int16) if x.dtype == torch.bfloat16 else x.float().view(torch.int32)
    if num_rows:
        block = 4096 if columns > 16384 else 1024
        _row_hashes[(num_rows,)](
            bits,
            rows,
            table,
            bits.stride(0),
            columns,
            32 - 8 * bits.element_size(),
            block,
            num_warps=block // 256,
        )


@triton.jit
def _row_hashes(
    bits, rows, table, stride, columns, SHIFT: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        wide = (
            tl.load(bits + row * stride + column, mask=column < columns, other=0).to(tl.int32)
            << SHIFT
        )
        x = (column + 1).to(tl.uint64) * GOLDEN + wide.to(tl.int64).to(
            tl.uint64, bitcast=True
        ) * ODD
        x = (x ^ (x >> 30)) * MIX_1
        x = (x ^ (x >> 27)) * MIX_2
        x = x ^ (x >> 31)
        total += tl.where(column < columns, x.to(tl.int64, bitcast=True), 0)
    if rows is not None:
        row = tl.load(rows + row)
    tl.store(table + row, tl.sum(total, axis=0))
