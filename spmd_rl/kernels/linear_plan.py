"""Which rows of a matrix product go to cuBLAS on NVIDIA GPUs, and which to our kernels.

cuBLAS is the faster for many rows, but may split K when it likes. It is therefore called for a few listed numbers of
rows only, and only where it has been seen to give the Triton kernel's bits in this process: first for ordinary data,
then for data whose halves cancel, so that nothing but the rounding of the chain is left. Other rows go to Triton.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from spmd_rl.kernels.linear_tiles import REFERENCE, Share, choose_gated_tile, choose_ring, choose_share, choose_tile
from spmd_rl.kernels.tile import dense
from spmd_rl.kernels.verified import has_dsl

CHUNKS = (16384, 8192, 4096, 2048, 1024, 512)  # rows taken from a larger product
WHOLE = {256: 2048, 128: 4096}  # rows of a whole product: weight rows above which cuBLAS is the faster
COMPARED_ROWS = 1024
HOPPER = 9

Key = tuple[int, int, int, bool, torch.dtype, torch.device]
_admitted: dict[Key, bool] = {}


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """x @ weight.T + bias with fp32 accumulators and one rounding to `out_dtype`.

    While a CUDA graph is recorded, no kernel of it may write the weight.

    Shape: x [M, K] and weight [N, K] bf16; returns [M, N].
    """
    x, given = dense(x), weight
    weight = dense(given)
    num_rows = x.shape[0]
    out, done = x.new_empty(num_rows, weight.shape[0], dtype=out_dtype), 0
    shared = _share(out, x, given, gated=False) is not None
    for rows in () if shared else (num_rows,) if num_rows in WHOLE else CHUNKS:
        while num_rows - done >= rows and _takes(rows, x, weight, bias, out_dtype):
            part = slice(done, done + rows)
            _cublas(out[part], x[part], weight, bias)
            done += rows
    if done < num_rows:
        ours_into(out[done:], x[done:], given, bias)
    return out


def ours_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool = False) -> None:
    """`linear_triton.matmul_into`, or what has its bits and is faster for these shapes."""
    (num_rows, k), n = x.shape, out.shape[1]
    share, ring = _share(out, x, weight, gated), choose_ring(num_rows, n, k, gated)
    if share is not None:
        from spmd_rl.kernels.linear_cute import shared_matmul_into

        shared_matmul_into(out, dense(x), weight, bias, share, gated)
    elif ring is not None and _may_be_early(weight):
        from spmd_rl.kernels.linear_gluon import ring_matmul_into

        ring_matmul_into(out, dense(x), weight, bias, ring, gated)
    else:
        from spmd_rl.kernels.linear_triton import matmul_into

        tile = choose_gated_tile(num_rows, n) if gated else choose_tile(num_rows, n)
        matmul_into(out, x, weight, bias, tile, gated)


def _share(out: Tensor, x: Tensor, weight: Tensor, gated: bool) -> Share | None:
    """Chosen where results go to memory in units of 16 bytes, and the package for such kernels is there."""
    share = choose_share(x.shape[0], out.shape[1], x.shape[1], gated)
    if share is None or out.dtype != torch.bfloat16 or out.stride(0) % 8 or out.data_ptr() % 16:
        return None
    return share if _may_be_early(weight) and has_dsl() else None


def _may_be_early(weight: Tensor) -> bool:
    """A weight that would be copied first is one that a kernel of a graph writes, which no ring must read early."""
    return weight.is_contiguous() and weight.data_ptr() % 16 == 0 and _has_wgmma(weight.device)


@cache
def _has_wgmma(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == HOPPER


def _takes(rows: int, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> bool:
    n, k = weight.shape
    if n % 8 or k % 8 or n <= WHOLE.get(rows, 0):
        return False
    key = (n, k, rows, bias is not None, out_dtype, x.device)
    if key not in _admitted:
        if torch.cuda.is_current_stream_capturing():
            return False
        _admitted[key] = proves_equal(*key)
    return _admitted[key]


@torch.no_grad()
def proves_equal(n: int, k: int, rows: int, has_bias: bool, out_dtype: torch.dtype, device: torch.device) -> bool:
    """Whether cuBLAS gives the reference kernel's bits for this shape."""
    from spmd_rl.kernels.linear_triton import matmul_into

    generator = torch.Generator(device).manual_seed(0)

    def draw(count: int) -> Tensor:
        return torch.randn(count, k, dtype=torch.bfloat16, device=device, generator=generator)

    x, weight = draw(rows), draw(n)
    bias = torch.linspace(-1e-4, 1e-4, n, device=device).bfloat16() if has_bias else None
    out, expected = (torch.empty(size, n, dtype=out_dtype, device=device) for size in (rows, min(rows, COMPARED_ROWS)))
    bits = torch.int16 if out_dtype == torch.bfloat16 else torch.int32
    for cancelling in (False, True):
        if cancelling:
            x[:, k // 2 :] = -x[:, : k - k // 2]
            weight[:, k // 2 :] = weight[:, : k - k // 2]
        _cublas(out, x, weight, bias)
        for start in range(0, rows, COMPARED_ROWS):
            part = slice(start, start + COMPARED_ROWS)
            matmul_into(expected, x[part], weight, bias, REFERENCE)
            if not torch.equal(out[part].view(bits), expected.view(bits)):
                return False
    return True


def _cublas(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if bias is not None:
        torch.addmm(bias, x, weight.t(), out=out)
    elif out.dtype == x.dtype:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
