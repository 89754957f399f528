"""The ways in which cuBLAS would multiply a shape, through cublasLt's C interface; torch takes the first of its own.

The constants are those of cublasLt.h. A split of K keeps partial sums in memory that the caller lends: who lent none
was proposed no such way so far.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

COMPUTE_FP32, FP32, BF16 = 68, 0, 14
TRANSPOSE_FIRST, TRANSPOSED = 3, 1
MAX_WORKSPACE = 1
MIN_ALIGNMENTS = range(5, 9)  # of both factors, of what is added, and of the result
ALIGNMENT = 16  # bytes
NOT_SUPPORTED = 15
MOST = 32
ONE, ZERO = c_float(1), c_float(0)


class Product(NamedTuple):
    """x @ weight.T. Shape: x [m, k] and weight [n, k] bf16; the result [m, n] in `out_dtype`, bf16 or fp32."""

    m: int
    n: int
    k: int
    out_dtype: torch.dtype
    device: torch.device


class _Found(ctypes.Structure):
    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class _Described:
    """To cuBLAS matrices lie column by column: out.T [n, m] = (weight as [k, n]).T @ (x as [k, m])."""

    def __init__(self, product: Product) -> None:
        m, n, k, out_dtype, device = product
        self.handle = _handle(device)
        self.operation = _created("cublasLtMatmulDescCreate", c_int(COMPUTE_FP32), c_int(FP32))
        transposed = byref(c_int(TRANSPOSED))
        _call("cublasLtMatmulDescSetAttribute", self.operation, c_int(TRANSPOSE_FIRST), transposed, c_size_t(4))
        self.weight, self.x = _layout(BF16, k, n), _layout(BF16, k, m)
        self.out = _layout(BF16 if out_dtype == torch.bfloat16 else FP32, n, m)


class Way:
    """One way of one product, of contiguous matrices at whole multiples of 16 bytes, on torch's stream."""

    def __init__(self, described: _Described, found: _Found, workspace: Tensor | None) -> None:
        self._described, self._found, self._workspace = described, found, workspace
        self._room = 0 if workspace is None else workspace.data_ptr()

    def __call__(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        one, result = self._described, c_void_p(out.data_ptr())
        _call(
            "cublasLtMatmul",
            *(one.handle, one.operation, byref(ONE), c_void_p(weight.data_ptr()), one.weight),
            *(c_void_p(x.data_ptr()), one.x, byref(ZERO), result, one.out, result, one.out),
            *(byref(self._found), c_void_p(self._room), c_size_t(self._found.workspace)),
            c_void_p(torch.cuda.current_stream(out.device).cuda_stream),
        )


def proposed(product: Product, workspace_bytes: int = 0) -> list[Way]:
    """What cuBLAS proposes, best first as it thinks; nothing for a product that it does not have, or without cublasLt.

    The ways share a workspace, so no two of them may run at a time where there is one.
    Raises: RuntimeError with the status of a call that cublasLt refuses.
    """
    if _library() is None:
        return []
    described = _Described(product)
    wishes = _created("cublasLtMatmulPreferenceCreate")
    _wish(wishes, MAX_WORKSPACE, c_uint64(workspace_bytes))
    for alignment in MIN_ALIGNMENTS:
        _wish(wishes, alignment, c_uint32(ALIGNMENT))
    found, count = (_Found * MOST)(), c_int(0)
    _call(
        "cublasLtMatmulAlgoGetHeuristic",
        *(described.handle, described.operation, described.weight, described.x, described.out, described.out, wishes),
        *(c_int(MOST), found, byref(count)),
        accepted=(0, NOT_SUPPORTED),
    )
    _call("cublasLtMatmulPreferenceDestroy", wishes)
    room = torch.empty(workspace_bytes, dtype=torch.uint8, device=product.device) if workspace_bytes else None
    return [Way(described, one, room) for one in found[: count.value] if one.status == 0]


def _wish(wishes: c_void_p, attribute: int, value: c_uint32 | c_uint64) -> None:
    size = c_size_t(ctypes.sizeof(value))
    _call("cublasLtMatmulPreferenceSetAttribute", wishes, c_int(attribute), byref(value), size)


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
    try:
        return ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}")
    except OSError:
        return None


@cache
def _handle(device: torch.device) -> c_void_p:
    with torch.cuda.device(device):
        return _created("cublasLtCreate")
