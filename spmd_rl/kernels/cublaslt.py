"""The ways in which cuBLAS would multiply, through cublasLt's C interface; torch takes the first of its own.

The constants are those of cublasLt.h.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

COMPUTE_FP32, FP32, BF16 = 68, 0, 14
TRANSPOSE_FIRST, TRANSPOSED = 3, 1
MAX_WORKSPACE, REDUCTIONS, NO_REDUCTION = 1, 3, 0
MIN_ALIGNMENTS = range(5, 9)  # of both factors, of what is added, and of the result
ALIGNMENT = 16  # bytes
NOT_SUPPORTED = 15
MOST = 32
ONE, ZERO = c_float(1), c_float(0)

Multiply = Callable[[Tensor, Tensor, Tensor], None]  # takes out, x, weight


class _Proposal(ctypes.Structure):
    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


def proposed(
    rows: int, n: int, k: int, out_dtype: torch.dtype, device: torch.device, workspace_bytes: int = 0
) -> list[Multiply]:
    """What cuBLAS proposes for x @ weight.T, best first as it thinks; nothing where cublasLt is not to be had.

    Without a workspace it is asked for ways that keep no partial sums, and so do not split K. Ways of one answer share
    theirs: no two of them may run at a time. Each takes contiguous matrices at whole multiples of 16 bytes, whose
    shapes and types it does not check, and launches on torch's stream.

    Shape: x [rows, k] and weight [n, k] bf16, out [rows, n] in `out_dtype`, bf16 or fp32.
    Raises: RuntimeError with the status of a call that cublasLt refuses; so does each way.
    """
    if _library() is None:
        return []
    # To cuBLAS matrices lie column by column: out.T [n, rows] = (weight as [k, n]).T @ (x as [k, rows]).
    handle, operation = _handle(device), _created("cublasLtMatmulDescCreate", c_int(COMPUTE_FP32), c_int(FP32))
    transposed = byref(c_int(TRANSPOSED))
    _call("cublasLtMatmulDescSetAttribute", operation, c_int(TRANSPOSE_FIRST), transposed, c_size_t(4))
    of_weight, of_x = _layout(BF16, k, n), _layout(BF16, k, rows)
    of_out = _layout(BF16 if out_dtype == torch.bfloat16 else FP32, n, rows)
    found, count, wishes = (_Proposal * MOST)(), c_int(0), _wishes(workspace_bytes)
    _call(
        "cublasLtMatmulAlgoGetHeuristic",
        *(handle, operation, of_weight, of_x, of_out, of_out, wishes),
        *(c_int(MOST), found, byref(count)),
        accepted=(0, NOT_SUPPORTED),
    )
    _call("cublasLtMatmulPreferenceDestroy", wishes)
    workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)

    def way(proposal: _Proposal) -> Multiply:
        def multiply(out: Tensor, x: Tensor, weight: Tensor) -> None:
            result = c_void_p(out.data_ptr())
            _call(
                "cublasLtMatmul",
                *(handle, operation, byref(ONE), c_void_p(weight.data_ptr()), of_weight),
                *(c_void_p(x.data_ptr()), of_x, byref(ZERO), result, of_out, result, of_out),
                *(byref(proposal), c_void_p(workspace.data_ptr()), c_size_t(proposal.workspace)),
                c_void_p(torch.cuda.current_stream(device).cuda_stream),
            )

        return multiply

    return [way(proposal) for proposal in found[: count.value] if proposal.status == 0]


def _wishes(workspace_bytes: int) -> c_void_p:
    wishes = _created("cublasLtMatmulPreferenceCreate")
    values: list[tuple[int, c_uint32 | c_uint64]] = [(MAX_WORKSPACE, c_uint64(workspace_bytes))]
    values += [(attribute, c_uint32(ALIGNMENT)) for attribute in MIN_ALIGNMENTS]
    if not workspace_bytes:
        values.append((REDUCTIONS, c_uint32(NO_REDUCTION)))
    for attribute, value in values:
        size = c_size_t(ctypes.sizeof(value))
        _call("cublasLtMatmulPreferenceSetAttribute", wishes, c_int(attribute), byref(value), size)
    return wishes


def _layout(dtype: int, rows: int, columns: int) -> c_void_p:
    return _created("cublasLtMatrixLayoutCreate", c_int(dtype), c_uint64(rows), c_uint64(columns), c_int64(rows))


def _created(name: str, *arguments: Any) -> c_void_p:
    made = c_void_p()
    _call(name, byref(made), *arguments)
    return made


def _call(name: str, *arguments: Any, accepted: tuple[int, ...] = (0,)) -> None:
    status = getattr(_library(), name)(*arguments)
    if status not in accepted:
        raise RuntimeError(f"{name}: status {status}")


@cache
def _library() -> ctypes.CDLL | None:
    """The one that torch has loaded; None for a torch that has it built in."""
    name = f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}"
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None


@cache
def _handle(device: torch.device) -> c_void_p:
    with torch.cuda.device(device):
        return _created("cublasLtCreate")
