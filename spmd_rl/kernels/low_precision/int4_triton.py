"""Codes of 4 bits in Triton: unpacked in registers for a product, and rounded to."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

# 1.5 * 2^23: a small float32 plus this has the nearest whole number, as a two's complement, in its
# last bits.
MAGIC = tl.constexpr(12582912.0)
# $2 has four bytes, $3 and $4 have their scales. Two codes, each with 0x4308 as exclusive or, are
# bfloat16 numbers: 136 more than the codes.
_UNPACK = """
    {{
    .reg .b32 four, low, high, bias;
    mov.b32 bias, 0x43084308;
    shr.b32 four, $2, {shift};
    and.b32 four, four, 0x0f0f0f0f;
    prmt.b32 low, four, 0, 0x4140;
    prmt.b32 high, four, 0, 0x4342;
    xor.b32 low, low, bias;
    xor.b32 high, high, bias;
    sub.rn.bf16x2 low, low, bias;
    sub.rn.bf16x2 high, high, bias;
    mul.rn.bf16x2 $0, low, $3;
    mul.rn.bf16x2 $1, high, $4;
    }}
"""
LOW, HIGH = (tl.constexpr(_UNPACK.format(shift=shift)) for shift in (0, 4))


@triton.jit
def int4_products(packed, scale, PART: tl.constexpr) -> tl.tensor:
    """Return the codes in the low bits of bytes (part 0) or in their high ones, each times the
    scale of its row, in bfloat16. Needs Hopper. Shape: packed [N, K], scale [N].

    Four are made at a time, and two are subtracted and multiplied at once, both exactly.
    """
    factors = tl.broadcast_to(scale.to(tl.bfloat16)[:, None], packed.shape)
    return tl.inline_asm_elementwise(
        HIGH if PART else LOW,
        "=r,=r,r,r,r",
        [packed, factors],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def nearest_int4(scaled) -> tl.tensor:
    """Return the nearest codes, ties to even, in the low bits of bytes. Shape: any, fp32.

    What is no number becomes 0: then its scale is none either.
    """
    bits = (tl.where(scaled == scaled, scaled, 0.0) + MAGIC).to(tl.int32, bitcast=True)
    return (bits & 15).to(tl.uint8)


@triton.jit
def int4_numbers(packed, PART: tl.constexpr) -> tl.tensor:
    """Return a part of the codes without their scales, in fp32. Shape: any, bytes."""
    bits = (packed >> (4 * PART)).to(tl.int32) & 15
    return ((bits ^ 8) - 8).to(tl.float32)
