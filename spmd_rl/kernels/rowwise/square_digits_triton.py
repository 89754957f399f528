"""Sums of squares in whole numbers of a few units, on GPUs: exact, so their order does not count.

Every value is a product by a power of two, a whole number or an exact rest, in float64.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK, TURNS = 1024, 32  # elements that a program takes at a time, and how often
WARPS = 8
# Added and taken away again, it rounds a float64 below 2^51 to a whole number, half to even.
TO_WHOLE = tl.constexpr(1.5 * 2.0**52)


def add_square_digits(sums: Tensor, x: Tensor, shift: int, bits: int) -> None:
    """Add the three digits of the squares of `x` to `sums`.

    The first digit counts 2^-shift, and each one that follows 2^-bits of the one before it. The
    sums of digits must stay below 2^52.
    Shape: sums [3] fp64, x of any shape, fp32 and contiguous.
    """
    programs = triton.cdiv(x.numel(), BLOCK * TURNS)
    if programs:
        _add_square_digits[(programs,)](
            x, sums, x.numel(), shift // 2, shift % 2, bits, BLOCK, TURNS, num_warps=WARPS
        )


@triton.jit(do_not_specialize=["half_shift", "odd_shift", "bits"])
def _add_square_digits(
    x, sums, size, half_shift, odd_shift, bits, BLOCK: tl.constexpr, TURNS: tl.constexpr
) -> None:
    first = tl.program_id(0).to(tl.int64) * (BLOCK * TURNS)
    half, odd, finer = _power(half_shift), _power(odd_shift), _power(bits)
    coarse = tl.zeros((BLOCK,), tl.float64)
    middle, fine = coarse, coarse
    for turn in range(TURNS):
        at = first + turn * BLOCK + tl.arange(0, BLOCK)
        rest = tl.load(x + at, mask=at < size, other=0.0).to(tl.float64) * half
        rest = rest * rest * odd
        digit = _whole(rest)
        coarse += digit
        rest = (rest - digit) * finer
        digit = _whole(rest)
        middle += digit
        fine += _whole((rest - digit) * finer)
    tl.atomic_add(sums, tl.sum(coarse, 0))
    tl.atomic_add(sums + 1, tl.sum(middle, 0))
    tl.atomic_add(sums + 2, tl.sum(fine, 0))


@triton.jit
def _whole(x) -> tl.tensor:
    return (x + TO_WHOLE) - TO_WHOLE


@triton.jit
def _power(exponent) -> tl.tensor:
    """Return 2^exponent in float64, for exponents of normal numbers."""
    return ((tl.cast(exponent, tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
