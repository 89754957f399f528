"""Algorithms that cuBLAS proposes for a GEMM, through cublasLt's C interface.

torch takes the first of its own list. The constants are those of cublasLt.h.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

COMPUTE_FP32, FP32, BF16 = 68, 0, 14
TRANSPOSE_FIRST, TRANSPOSED = 3, 1
EPILOGUE, ADD_BIAS, BIAS, BIAS_TYPE = 7, 4, 8, 26
MAX_WORKSPACE, REDUCTIONS, NO_REDUCTION = 1, 3, 0
MIN_ALIGNMENTS = range(5, 9)  # of both factors, of the addend, and of the result
ALIGNMENT = 16  # bytes
INVALID, NOT_SUPPORTED = 7, 15
SPLITS = 2  # attribute of an algorithm: into how many parts it cuts K
COLUMNS = 3  # attribute of a matrix layout
MOST_ALGORITHMS = 32
ONE, ZERO = c_float(1), c_float(0)

Gemm = Callable[[Tensor, Tensor, Tensor, Tensor | None], None]  # takes out, x, weight, bias


class Unsupported(RuntimeError):
    """cublasLt cannot do what is asked. Nothing has run; another algorithm may do it."""


class Shape(NamedTuple):
    """Sizes and dtypes of x @ weight.T + bias.

    Both operands may be columns of wider matrices, of `width` columns; if 0, they are contiguous.
    Shape: x [rows, k], weight [n, k] and bias [n], all bf16; the result is bf16 or fp32.
    """

    n: int
    k: int
    rows: int
    has_bias: bool
    out_dtype: torch.dtype
    device: torch.device
    width: int = 0


@dataclass(frozen=True)
class CublasAlgorithm:
    """An algorithm, and into how many parts it says that it cuts K; 0 where it does not say.

    `identity` names it among all algorithms of this version of cuBLAS on this kind of GPU.
    """

    multiply: Gemm
    splits: int
    identity: bytes = b""

    def __call__(self, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.multiply(out, x, weight, bias)


class _Proposal(ctypes.Structure):
    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


def propose_algorithms(shape: Shape, workspaces: Sequence[int] = (0,)) -> list[CublasAlgorithm]:
    """Return the algorithms that cuBLAS proposes for these sizes of workspace, without repeats.

    They are ordered by cuBLAS's own estimate. The list is empty where cublasLt is not available.

    With a workspace of 0 bytes, cuBLAS is asked for algorithms that keep no partial sums, and so do
    not split K. An algorithm multiplies any number of rows by its kernel for those of the shape.
    The algorithms of one answer share their call's arguments: no two of them may run at a time, nor
    be called from two threads. Each takes operands with rows at multiples of 16 bytes, of
    which it checks no widths, strides or dtypes, and launches on torch's stream.

    Raises: Unsupported, and RuntimeError with the status of a call that fails. So does each
    algorithm: Unsupported for numbers of rows that its kernel does not take.
    """
    if _library() is None:
        return []
    n, k, rows, has_bias, out_dtype, device, width = shape
    # cuBLAS reads matrices column by column: out.T [n, rows] = (weight as [k, n]).T @ (x as [k,
    # rows]).
    handle = _handle(device)
    operation = _created("cublasLtMatmulDescCreate", c_int(COMPUTE_FP32), c_int(FP32))
    _set("Desc", operation, TRANSPOSE_FIRST, c_int(TRANSPOSED))
    if has_bias:
        some = torch.empty(n, dtype=torch.bfloat16, device=device)
        for attribute, value in (
            (EPILOGUE, c_int(ADD_BIAS)),
            (BIAS_TYPE, c_int(BF16)),
            (BIAS, _address(some)),
        ):
            _set("Desc", operation, attribute, value)
    of_weight, of_x = (_layout(BF16, k, count, width or k) for count in (n, rows))
    of_out = _layout(BF16 if out_dtype == torch.bfloat16 else FP32, n, rows, n)
    workspace = torch.empty(max(workspaces), dtype=torch.uint8, device=device)
    columns = [rows]  # what the layouts of x and of the product say

    def gemm_of(proposal: _Proposal) -> Gemm:
        def multiply(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
            if bias is not None:
                _set("Desc", operation, BIAS, _address(bias))
            if (count := len(x)) != columns[0]:
                for layout in of_x, of_out:
                    _set_columns(layout, count)
                columns[0] = count
            result = _address(out)
            _call(
                "cublasLtMatmul",
                *(handle, operation, byref(ONE), _address(weight), of_weight, _address(x), of_x),
                *(byref(ZERO), result, of_out, result, of_out),
                *(byref(proposal), _address(workspace), c_size_t(proposal.workspace)),
                # torch.cuda.current_stream takes 20 us
                c_void_p(torch._C._cuda_getCurrentRawStream(x.device.index)),
            )

        return multiply

    different = {
        bytes(one.algorithm): one
        for size in workspaces
        for one in _proposals(handle, operation, of_weight, of_x, of_out, size)
    }
    return [
        CublasAlgorithm(gemm_of(one), _splits(one), identity) for identity, one in different.items()
    ]


def library_version() -> int:
    """Return the version of the cublasLt that runs; 0 where it is not available."""
    if (library := _library()) is None:
        return 0
    library.cublasLtGetVersion.restype = c_size_t
    return int(library.cublasLtGetVersion())


def _proposals(
    handle: c_void_p,
    operation: c_void_p,
    of_weight: c_void_p,
    of_x: c_void_p,
    of_out: c_void_p,
    workspace_bytes: int,
) -> list[_Proposal]:
    found, count, preference = (
        (_Proposal * MOST_ALGORITHMS)(),
        c_int(0),
        _preference(workspace_bytes),
    )
    _call(
        "cublasLtMatmulAlgoGetHeuristic",
        *(handle, operation, of_weight, of_x, of_out, of_out, preference),
        *(c_int(MOST_ALGORITHMS), found, byref(count)),
        accepted=(0, NOT_SUPPORTED),
    )
    _call("cublasLtMatmulPreferenceDestroy", preference)
    return [one for one in found[: count.value] if one.status == 0]


def _splits(proposal: _Proposal) -> int:
    """Return into how many parts an algorithm cuts K; 0 where it does not say."""
    value, written = c_int(0), c_size_t(0)
    size = c_size_t(ctypes.sizeof(value))
    _call(
        "cublasLtMatmulAlgoConfigGetAttribute",
        *(byref(proposal), c_int(SPLITS), byref(value), size, byref(written)),
        accepted=(0, INVALID, NOT_SUPPORTED),
    )
    return value.value


def _preference(workspace_bytes: int) -> c_void_p:
    preference = _created("cublasLtMatmulPreferenceCreate")
    _set("Preference", preference, MAX_WORKSPACE, c_uint64(workspace_bytes))
    for attribute in MIN_ALIGNMENTS:
        _set("Preference", preference, attribute, c_uint32(ALIGNMENT))
    if not workspace_bytes:
        _set("Preference", preference, REDUCTIONS, c_uint32(NO_REDUCTION))
    return preference


def _set(
    kind: str, of: c_void_p, attribute: int, value: c_int | c_uint32 | c_uint64 | c_void_p
) -> None:
    _call(
        f"cublasLtMatmul{kind}SetAttribute",
        of,
        c_int(attribute),
        byref(value),
        c_size_t(ctypes.sizeof(value)),
    )


def _set_columns(layout: c_void_p, count: int) -> None:
    value = c_uint64(count)
    size = c_size_t(ctypes.sizeof(value))
    _call("cublasLtMatrixLayoutSetAttribute", layout, c_int(COLUMNS), byref(value), size)


def _address(x: Tensor) -> c_void_p:
    return c_void_p(x.data_ptr())


def _layout(dtype: int, rows: int, columns: int, apart: int) -> c_void_p:
    """Describe a matrix whose columns lie `apart` elements from each other."""
    return _created(
        "cublasLtMatrixLayoutCreate",
        *(c_int(dtype), c_uint64(rows), c_uint64(columns), c_int64(apart)),
    )


def _created(name: str, *arguments: Any) -> c_void_p:
    made = c_void_p()
    _call(name, byref(made), *arguments)
    return made


def _call(name: str, *arguments: Any, accepted: tuple[int, ...] = (0,)) -> None:
    status = getattr(_library(), name)(*arguments)
    if status not in accepted:
        kind = Unsupported if status in (INVALID, NOT_SUPPORTED) else RuntimeError
        raise kind(f"{name}: status {status}")


@cache
def _library() -> ctypes.CDLL | None:
    """Return the library that torch has loaded; None for a torch that has it built in."""
    name = f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}"
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None


@cache
def _handle(device: torch.device) -> c_void_p:
    with torch.cuda.device(device):
        return _created("cublasLtCreate")
