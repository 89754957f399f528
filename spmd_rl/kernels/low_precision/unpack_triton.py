"""What kernels do with codes of any format: `BITS` of a code and `BLOCK_N` rows of a block choose.

A byte with several codes has several parts of a block: kernels go through the parts one after the
other, so that columns come in ascending order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from spmd_rl.kernels.low_precision.e4m3_triton import (
    e4m3_numbers,
    e4m3_products,
    nearest_e4m3,
)
from spmd_rl.kernels.low_precision.int4_triton import int4_numbers, int4_products, nearest_int4


@triton.jit
def scale_offset(first_row, rows, n, blocks, BLOCK_N: tl.constexpr) -> tl.tensor:
    """Return where the scales of a tile's rows begin: one place for those of a block, or each."""
    return tl.minimum(rows, n - 1) * blocks if BLOCK_N == 1 else first_row // BLOCK_N * blocks


@triton.jit
def products_of(packed, scale, PART: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Return a part of the codes, each times the scale of its row, in bfloat16."""
    return int4_products(packed, scale, PART) if BITS == 4 else e4m3_products(packed, scale)


@triton.jit
def nearest_codes(scaled, BITS: tl.constexpr) -> tl.tensor:
    """Return the nearest codes to numbers that are divided by their scales, one in a byte."""
    return nearest_int4(scaled) if BITS == 4 else nearest_e4m3(scaled)


@triton.jit
def numbers_of(packed, PART: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Return what a part of the codes are without their scales, in fp32."""
    return int4_numbers(packed, PART) if BITS == 4 else e4m3_numbers(packed)
