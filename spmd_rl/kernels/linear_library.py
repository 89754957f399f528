"""Which of cuBLAS's ways to multiply a shape the contract takes, if any: the fastest that was seen to have its bits.

A way is compared with the reference kernel twice: for ordinary data, then for data whose halves cancel, so that nothing
but the rounding of the chain is left. As all that pass give the same bits, it does not matter that another process may
find another one the fastest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spmd_rl.kernels import cublaslt
from spmd_rl.kernels.linear_tiles import REFERENCE

COMPARED_ROWS = 1024
TURNS = 3
HEAD_START = 2_000_000  # cycles for which the GPU waits, so that kernels are timed and not their launches
MOST_CALLS = 16
L2_ROOM = 2  # weights of so many times the L2 cache, one after the other, come out of memory

Way = Callable[[Tensor, Tensor, Tensor, Tensor | None], None]  # takes out, x, weight, bias


class Shape(NamedTuple):
    """Of x [rows, k] and weight [n, k], bf16, the result in `out_dtype`."""

    n: int
    k: int
    rows: int
    has_bias: bool
    out_dtype: torch.dtype
    device: torch.device


@torch.no_grad()
def choose(shape: Shape, ours: Way) -> Way | None:
    """None where `ours` is the fastest, or no other way has its bits."""
    ways = [way for way in ways_of(shape) if proves_equal(way, shape)]
    found = [ours, *ways]
    times = _times(found, shape) if ways else [0.0]
    best = times.index(min(times))
    return found[best] if best else None


def ways_of(shape: Shape) -> list[Way]:
    """What torch takes and, of products without a bias, what cuBLAS proposes to who lends it no memory."""
    if shape.has_bias:
        return [by_torch]
    n, k, rows, _, out_dtype, device = shape
    return [by_torch, *map(_unbiased, cublaslt.proposed(cublaslt.Product(rows, n, k, out_dtype, device)))]


def by_torch(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if bias is not None:
        torch.addmm(bias, x, weight.t(), out=out)
    elif out.dtype == x.dtype:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)


def proves_equal(way: Way, shape: Shape) -> bool:
    """Whether `way` gives the reference kernel's bits for this shape."""
    from spmd_rl.kernels.linear_triton import matmul_into

    x, weight, bias, out = _operands(shape)
    expected, k = out.new_empty(min(shape.rows, COMPARED_ROWS), shape.n), shape.k
    bits = torch.int16 if shape.out_dtype == torch.bfloat16 else torch.int32
    for cancelling in (False, True):
        if cancelling:
            x[:, k // 2 :] = -x[:, : k - k // 2]
            weight[:, k // 2 :] = weight[:, : k - k // 2]
        way(out, x, weight, bias)
        for start in range(0, shape.rows, COMPARED_ROWS):
            part = slice(start, start + COMPARED_ROWS)
            matmul_into(expected, x[part], weight, bias, REFERENCE)
            if not torch.equal(out[part].view(bits), expected.view(bits)):
                return False
    return True


def _operands(shape: Shape) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    n, k, rows, has_bias, out_dtype, device = shape
    generator = torch.Generator(device).manual_seed(0)
    x, weight = (torch.randn(count, k, dtype=torch.bfloat16, device=device, generator=generator) for count in (rows, n))
    bias = torch.linspace(-1e-4, 1e-4, n, device=device).bfloat16() if has_bias else None
    return x, weight, bias, x.new_empty(rows, n, dtype=out_dtype)


def _times(ways: Sequence[Way], shape: Shape) -> list[float]:
    """Median milliseconds of each, in turns, for weights that lie in memory."""
    x, weight, bias, out = _operands(shape)
    cache_bytes = torch.cuda.get_device_properties(shape.device).L2_cache_size
    count = min(-(-L2_ROOM * cache_bytes // weight.nbytes), MOST_CALLS)
    weights = [weight, *(weight.clone() for _ in range(count - 1))]
    spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in ways]
    for _ in range(1 + TURNS):
        for way, found in zip(ways, spans, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(HEAD_START)
            begin.record()
            for one in weights:
                way(out, x, one, bias)
            end.record()
            found.append((begin, end))
    torch.cuda.synchronize(shape.device)
    return [statistics.median(begin.elapsed_time(end) for begin, end in found[1:]) for found in spans]


def _unbiased(way: cublaslt.Way) -> Way:
    return lambda out, x, weight, _: way(out, x, weight)
