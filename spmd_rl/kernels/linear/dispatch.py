"""Dispatch of GEMMs on NVIDIA GPUs: to cuBLAS or to our kernels.

cuBLAS is faster for many rows. It is called only where one of its algorithms has the contract's
bits (cublas.py) and is the fastest. It is tried for the numbers of rows that decoding has most, and
from 512 rows on, where all numbers of rows up to the next power of two share an algorithm. Other
products go to our kernels.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

from spmd_rl.kernels.linear.cublaslt import Gemm, Shape, Unsupported
from spmd_rl.kernels.linear.kept_choices import choose
from spmd_rl.kernels.linear.tiles import (
    PART,
    Share,
    choose_chained_tile,
    choose_gated_tile,
    choose_ring,
    choose_share,
    choose_tile,
    in_chains,
)
from spmd_rl.kernels.runtime.capability import HOPPER
from spmd_rl.kernels.runtime.padding import dense, dense_rows, has_dense_rows, row_stride
from spmd_rl.kernels.runtime.versions import has_dsl

# Below LEAST_ROWS cuBLAS is tried only for these numbers of rows, and for weights of more rows than
# the value.
CUBLAS_BATCHES = {256: 2048, 128: 2048, 64: 65536}
LEAST_ROWS = 512
# Of one call: rows, and elements of an operand or of the product, which kernels index in 32 bits.
MOST_ROWS, MOST_ELEMENTS = 65536, 1 << 30
NUMBERS_OF_PARTS = (1, 2, 4, 8)  # of a sum over K
MOST_PART_BYTES = 256 << 20  # of the fp32 parts of a sum over K, at a time

_chosen: dict[Shape, Gemm | None] = {}


def matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    num_parts: int = 1,
) -> Tensor:
    """Return x @ weight.T + bias with fp32 accumulators and one rounding to `out_dtype`.

    K may be cut into 2, 4 or 8 equal parts, whose products are added in the tree of
    `row_shards.py`. Operands may be columns of wider matrices.

    While a CUDA graph is recorded, no kernel of it may write the weight. The first product of a
    shape may take a fraction of a second, in which cuBLAS's algorithms are compared.

    Shape: x [M, K], weight [N, K] and bias [N] bf16; returns [M, N]. Raises: ValueError for other
    operands, and for other numbers of parts.
    """
    n, k = weight.shape
    if num_parts not in NUMBERS_OF_PARTS or k % num_parts:
        raise ValueError(f"{num_parts} parts: {k} columns are summed in 1, 2, 4 or 8 equal ones")
    for operand, shape in (x, (len(x), k)), (weight, (n, k)), (bias, (n,)):
        if operand is not None and (operand.shape != shape or operand.dtype != torch.bfloat16):
            raise ValueError(
                f"{list(operand.shape)} {operand.dtype}: "
                f"no operand of a product with [{n}, {k}] bfloat16"
            )
    x, out = dense_rows(x), x.new_empty(len(x), n, dtype=out_dtype)
    most = most_rows(n, k, num_parts)
    for start in range(0, len(x), most):
        rows = slice(start, start + most)
        _sum_into(out[rows], x[rows], weight, bias, num_parts)
    return out


@cache
def most_rows(n: int, k: int, num_parts: int = 1) -> int:
    """Return how many rows one call may have: a power of two."""
    most = min(MOST_ROWS, 1 << (MOST_ELEMENTS // max(n, k)).bit_length() - 1)
    if num_parts == 1:
        return most
    return min(most, 1 << (MOST_PART_BYTES // (4 * n * num_parts)).bit_length() - 1)


def _sum_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, num_parts: int) -> None:
    """Sum over parts of K: in one kernel where that is faster, else part by part."""
    if num_parts == 1:
        _matmul_into(out, x, weight, bias)
        return
    if _is_one_kernel(len(x), x.shape[1], num_parts):
        own_matmul_into(out, x, weight, bias, chains=num_parts)
        return
    from spmd_rl.kernels.linear.part_sums_triton import add_parts

    parts = out.new_empty(num_parts, *out.shape, dtype=torch.float32)
    halves = zip(parts, x.chunk(num_parts, 1), weight.chunk(num_parts, 1), strict=True)
    for part, own_x, own_weight in halves:
        _matmul_into(part, dense_rows(own_x), own_weight, None)
    add_parts(parts, bias, out)


def _is_one_kernel(num_rows: int, k: int, num_parts: int) -> bool:
    """Return whether one kernel sums all parts of K, as it does where rows are few."""
    return num_rows < LEAST_ROWS and k // num_parts % PART == 0


def _matmul_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    width = row_stride(weight)
    takes_columns = has_dense_rows(weight) and row_stride(x) == width
    width = width if takes_columns and width != weight.shape[1] else 0
    if gemm := _cublas_gemm(x, weight, bias, out.dtype, width):
        given = (x, weight) if width else (dense(x), dense(weight))
        try:
            gemm(out, *given, None if bias is None else dense(bias))
        except Unsupported as error:  # our kernel has the same bits
            warnings.warn(f"a slower kernel multiplies {len(x)} rows: {error}", stacklevel=4)
        else:
            return
    own_matmul_into(out, x, weight, bias)


def own_matmul_into(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gated: bool = False,
    chains: int = 1,
) -> None:
    """Multiply by the fastest of our kernels for these shapes; all have the same bits.

    Arguments are those of `triton_gemm.matmul_into`. With several `chains`, each has a multiple of
    `PART` of K.
    """
    (num_rows, k), n = x.shape, out.shape[1]
    share, ring = _share(out, x, weight, gated, chains), choose_ring(num_rows, n, k, gated)
    if share is not None:
        from spmd_rl.kernels.linear.cute import shared_matmul_into

        shared_matmul_into(out, dense_rows(x), weight, bias, share, gated, chains)
    elif ring is not None and _may_be_early(weight):
        from spmd_rl.kernels.linear.gluon import ring_matmul_into

        ring = ring if chains == 1 else in_chains(ring, k // chains)
        ring_matmul_into(out, dense_rows(x), weight, bias, ring, gated, chains)
    else:
        from spmd_rl.kernels.linear.triton_gemm import matmul_into

        tile = (choose_gated_tile(num_rows, n) if gated else None) or choose_tile(num_rows, n)
        tile = tile if chains == 1 else choose_chained_tile(num_rows, n, k // chains)
        matmul_into(out, x, weight, bias, tile, gated, chains)


def _share(out: Tensor, x: Tensor, weight: Tensor, gated: bool, chains: int) -> Share | None:
    """Choose a share for the CuTe kernel, or None where that kernel is slower or cannot run.

    It stores units of 16 bytes, and needs the package that it is written in.
    """
    share = choose_share(x.shape[0], out.shape[1], x.shape[1], gated)
    if share is not None and chains > 1 and x.shape[1] // chains % share.k:
        return None
    if share is None or out.dtype != torch.bfloat16 or out.stride(0) % 8 or out.data_ptr() % 16:
        return None
    return share if _may_be_early(weight) and has_dsl() else None


def _may_be_early(weight: Tensor) -> bool:
    """Return whether a ring may read the weight before its kernel's wait.

    A weight that must be copied first is written by a kernel of the graph, so no ring may.
    """
    return has_dense_rows(weight) and has_wgmma(weight.device)


@cache
def has_wgmma(device: torch.device) -> bool:
    """Whether a GPU is a Hopper, which alone has wgmma."""
    return torch.cuda.get_device_capability(device)[0] == HOPPER


def _cublas_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, width: int
) -> Gemm | None:
    (n, k), rows = weight.shape, len(x)
    if (
        n % 8
        or k % 8
        or n <= CUBLAS_BATCHES.get(rows, 0)
        or (rows < LEAST_ROWS and rows not in CUBLAS_BATCHES)
    ):
        return None
    most = 1 << (rows - 1).bit_length()
    shape = Shape(n, k, most, bias is not None, out_dtype, x.device, width)
    if shape not in _chosen:
        if torch.cuda.is_current_stream_capturing():
            return None
        _chosen[shape] = choose(
            shape, most // 2 + 1 if most > LEAST_ROWS else most, own_matmul_into
        )
    return _chosen[shape]
