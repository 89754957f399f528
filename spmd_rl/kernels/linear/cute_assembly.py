"""Assembly in the products of `linear_cute`, for what the CuTe DSL has no words for."""

from __future__ import annotations

from typing import Any

from cutlass import Float32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

SILU_TIMES = """{ .reg .f32 t; mul.rn.f32 t, $1, 0fBFB8AA3B; ex2.approx.f32 t, t; add.rn.f32 t, t, 0f3F800000;
div.full.f32 t, $1, t; mul.rn.f32 $0, t, $2; }"""  # what Triton makes of x / (1 + exp(-x)) * y


def after_wait(number: Any) -> Any:
    """The same, which the compiler does not read before the wait; where it does, it waits after
    each wgmma.
    """
    return _assembly("", "=f,0", number)


def silu_times(gate: Any, up: Any) -> Any:
    return _assembly(SILU_TIMES, "=f,f,f", gate, up)


@dsl_user_op  # type: ignore[untyped-decorator]
def _assembly(text: str, registers: str, *numbers: Any, loc: Any = None, ip: Any = None) -> Any:
    given = [number.ir_value(loc=loc, ip=ip) for number in numbers]
    options = {
        "has_side_effects": True,
        "is_align_stack": False,
        "asm_dialect": llvm.AsmDialect.AD_ATT,
    }
    return Float32(llvm.inline_asm(T.f32(), given, text, registers, **options))
