"""Inline assembly for the kernel in `cute.py`, where the CuTe DSL has no operation of its own."""

from __future__ import annotations

from typing import Any

from cutlass import Float32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

# the instructions that Triton makes of x / (1 + exp(-x)) * y
SILU_TIMES = (
    "{ .reg .f32 t; mul.rn.f32 t, $1, 0fBFB8AA3B; ex2.approx.f32 t, t; "
    "add.rn.f32 t, t, 0f3F800000; div.full.f32 t, $1, t; mul.rn.f32 $0, t, $2; }"
)


def after_wait(number: Any) -> Any:
    """Return `number`, hidden from the compiler until here.

    If the compiler saw a sum read before the wait, it would wait after each wgmma.
    """
    return _assembly("", "=f,0", number)


def added(first: Any, second: Any) -> Any:
    """Return the sum, added here: left to itself, the compiler keeps both until it is needed."""
    return _assembly("add.rn.f32 $0, $1, $2;", "=f,f,f", first, second)


def silu_times(gate: Any, up: Any) -> Any:
    """Return SiLU(gate) * up, with Triton's bits."""
    return _assembly(SILU_TIMES, "=f,f,f", gate, up)


@dsl_user_op  # type: ignore[untyped-decorator]
def _assembly(text: str, registers: str, *numbers: Any, loc: Any = None, ip: Any = None) -> Any:
    operands = [number.ir_value(loc=loc, ip=ip) for number in numbers]
    options = {
        "has_side_effects": True,
        "is_align_stack": False,
        "asm_dialect": llvm.AsmDialect.AD_ATT,
    }
    return Float32(llvm.inline_asm(T.f32(), operands, text, registers, **options))
