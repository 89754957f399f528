"""e4m3 codes in the CuTe DSL: unpacked in registers, two at a time."""

from __future__ import annotations

from typing import Any

from cutlass import Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

# Each step is exact: e4m3 is part of float16, which is part of float32. NaN stays NaN.
TO_BFLOAT16 = """
    {
    .reg .b16 low, high, first, second;
    .reg .b32 both;
    .reg .f32 x, y;
    mov.b32 {low, high}, $1;
    cvt.rn.f16x2.e4m3x2 both, HALF;
    mov.b32 {first, second}, both;
    cvt.f32.f16 x, first;
    cvt.f32.f16 y, second;
    cvt.rn.bf16x2.f32 $0, y, x;
    }
"""
TIMES = "mul.rn.bf16x2 $0, $1, $2;"


def numbers_of_two(codes: Any, half: int, exponent: int) -> Any:
    """Return what two codes stand for, times 2**exponent, as two numbers of bfloat16 in a word.

    `codes` has four, of which half 0 or 1 is taken.
    """
    text = TO_BFLOAT16.replace("HALF", ("low", "high")[half])
    numbers = _assembly(text, "=r,r", codes)
    if exponent == 0:
        return numbers
    factor = (127 + exponent) << 7
    return _assembly(TIMES, "=r,r,r", numbers, Uint32(factor << 16 | factor))


@dsl_user_op  # type: ignore[untyped-decorator]
def _assembly(text: str, registers: str, *words: Any, loc: Any = None, ip: Any = None) -> Any:
    operands = [word.ir_value(loc=loc, ip=ip) for word in words]
    options = {"has_side_effects": False, "is_align_stack": False}
    return Uint32(llvm.inline_asm(T.i32(), operands, text, registers, **options))
