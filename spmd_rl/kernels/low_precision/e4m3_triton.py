"""e4m3 codes in Triton: unpacked in registers for a product, and rounded to."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

# The bits of a code, moved to where bfloat16 has exponent and mantissa, are 2^-120 times the code.
_SHIFT = 2.0**120
SHIFT = tl.constexpr(_SHIFT)
# $2 has four codes, and $3 what two of them are multiplied by.
UNPACK = tl.constexpr("""
    {
    .reg .b32 low, high, sign, size;
    prmt.b32 low, $2, 0, 0x1404;
    prmt.b32 high, $2, 0, 0x3424;
    and.b32 sign, low, 0x80008000;
    shr.b32 size, low, 4;
    and.b32 size, size, 0x07f007f0;
    or.b32 low, size, sign;
    and.b32 sign, high, 0x80008000;
    shr.b32 size, high, 4;
    and.b32 size, size, 0x07f007f0;
    or.b32 high, size, sign;
    mul.rn.bf16x2 $0, low, $3;
    mul.rn.bf16x2 $1, high, $3;
    }
""")


@triton.jit
def e4m3_products(codes, scale) -> tl.tensor:
    """Return codes times a scale that all share, in bfloat16. Needs Hopper.

    Four are made at a time, each multiplied by a power of two once.
    """
    factor = (scale * SHIFT).to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
    factors = tl.zeros(codes.shape, tl.int32) + (factor | (factor << 16))
    return tl.inline_asm_elementwise(
        UNPACK,
        "=r,=r,r,r,r,r,r",
        [codes, factors],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def nearest_e4m3(scaled) -> tl.tensor:
    """Return the nearest codes, as bytes. Shape: any, fp32."""
    return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def e4m3_numbers(codes) -> tl.tensor:
    """Return what codes are without their scales, in fp32. Shape: any, bytes."""
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
