"""Every way of a matrix product that cuBLAS proposes, through cublasLt's C interface; torch leaves the choice to it.

The constants are those of cublasLt.h. Proposals may split K and take the workspace that torch gives on Hopper.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

COMPUTE_FP32, FP32, BF16 = 68, 0, 14
TRANSPOSE_FIRST, TRANSPOSED = 3, 1
MAX_WORKSPACE = 1
WORKSPACE_BYTES = 32 << 20
NOT_SUPPORTED = 15
PROPOSALS = 32


class _Proposal(ctypes.Structure):
    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


def proposed(out: Tensor, x: Tensor) -> list[Callable[[Tensor], None]]:
    """Ways to put x @ weight.T into `out`, best first as cuBLAS thinks; none where cublasLt does not have that product.

    Shape: x [M, K] bf16, out [M, N] bf16 or fp32; each takes a weight [N, K] bf16.
    Raises: RuntimeError with the status of a call that cublasLt refuses.
    """
    (m, n), k = out.shape, x.shape[1]
    # To cuBLAS matrices lie column by column: out.T [N, M] = (weight as [K, N]).T @ (x as [K, M]).
    operation = _created("cublasLtMatmulDescCreate", c_int(COMPUTE_FP32), c_int(FP32))
    _call("cublasLtMatmulDescSetAttribute", operation, c_int(TRANSPOSE_FIRST), byref(c_int(TRANSPOSED)), c_size_t(4))
    of_weight, of_x = _layout(BF16, k, n), _layout(BF16, k, m)
    of_out = _layout(BF16 if out.dtype == torch.bfloat16 else FP32, n, m)
    wishes = _created("cublasLtMatmulPreferenceCreate")
    size = c_uint64(WORKSPACE_BYTES)
    _call("cublasLtMatmulPreferenceSetAttribute", wishes, c_int(MAX_WORKSPACE), byref(size), c_size_t(8))
    found, count = (_Proposal * PROPOSALS)(), c_int(0)
    matrices = of_weight, of_x, of_out, of_out
    _call(
        "cublasLtMatmulAlgoGetHeuristic",
        *(_handle(), operation, *matrices, wishes),
        *(c_int(PROPOSALS), found, byref(count)),
        accepted=(0, NOT_SUPPORTED),
    )
    one, zero = c_float(1), c_float(0)

    def way(proposal: _Proposal) -> Callable[[Tensor], None]:
        def multiply(weight: Tensor) -> None:
            result = c_void_p(out.data_ptr())
            _call(
                "cublasLtMatmul",
                *(_handle(), operation, byref(one), c_void_p(weight.data_ptr()), of_weight),
                *(c_void_p(x.data_ptr()), of_x, byref(zero), result, of_out, result, of_out),
                *(byref(proposal), c_void_p(_workspace().data_ptr()), c_size_t(WORKSPACE_BYTES)),
                c_void_p(torch.cuda.current_stream().cuda_stream),
            )

        return multiply

    return [way(proposal) for proposal in found[: count.value] if proposal.status == 0]


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
def _library() -> ctypes.CDLL:
    """The one that torch has loaded."""
    return ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}")


@cache
def _handle() -> c_void_p:
    return _created("cublasLtCreate")


@cache
def _workspace() -> Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
