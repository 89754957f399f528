"""Which of cuBLAS's ways to multiply a shape the contract takes, if any: the fastest that was seen
to have its bits.

A way that says it cuts K is none of them. Others are compared with the reference kernel twice: for
ordinary data, then for data whose halves cancel, so that nothing but the rounding of the chain is
left. As all that pass give the same bits, it does not matter that another process may find another
one the fastest.

A way is one kernel for all numbers of rows, so it is compared for the most and the least that it
will have. The two that are left of a race meet alone in the end: what ran before decides the clock.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from spmd_rl.kernels.linear.cublaslt import Gemm, Shape, Unsupported, propose_algorithms
from spmd_rl.kernels.linear.tiles import REFERENCE
from spmd_rl.kernels.runtime.cuda_graph import capture
from spmd_rl.kernels.runtime.interleaved_timing import seconds

COMPARED_ROWS = 1024
ROUNDS = ((9, 4), (41, 2), (41, 1))  # turns of each way, and how many of the fastest go on
# what a graph of calls takes at about the pace of an H200, so that its launch is little beside it
TURN_S = 1e-3
BYTES_PER_S, FLOPS_PER_S = 4e12, 8e14
MOST_CALLS = 64
L2_ROOM = 2  # weights of so many times the L2 cache, one after the other, come out of memory


@torch.no_grad()
def choose(shape: Shape, least_rows: int, ours: Gemm) -> Gemm | None:
    """A way for `least_rows` up to those of the shape.

    None where `ours` is the fastest, no other way has its bits, or the GPU has no memory left to
    compare them in, with a warning. Not while a graph is recorded.

    Raises: Unsupported where cuBLAS does not take what it propose_algorithms for the shape itself.
    """
    try:
        ways = [
            way
            for way in propose_algorithms(shape)
            if way.splits <= 1 and has_reference_bits(way, shape)
        ]
        if least_rows != shape.rows:
            ways = [way for way in ways if _serves(way, shape._replace(rows=least_rows))]
        best = fastest([ours, *ways], shape) if ways else ours
    except torch.OutOfMemoryError:
        warnings.warn(
            f"no memory to compare cuBLAS's ways for {shape}: a slower kernel multiplies",
            stacklevel=2,
        )
        return None
    return None if best is ours else best


def _serves(way: Gemm, shape: Shape) -> bool:
    """Whether a way that was propose_algorithms for more rows has the bits for those of the shape, and
    multiplies them at all.
    """
    try:
        return has_reference_bits(way, shape)
    except Unsupported:
        return False


def has_reference_bits(way: Gemm, shape: Shape) -> bool:
    """Whether `way` gives the reference kernel's bits for this shape."""
    from spmd_rl.kernels.linear.triton_gemm import matmul_into

    x, weight, bias, out = _operands(shape)
    expected, k = out.new_empty(min(shape.rows, COMPARED_ROWS), shape.n), shape.k
    bits = torch.int16 if shape.out_dtype == torch.bfloat16 else torch.int32
    for cancelling in (False, True):
        if cancelling:
            x[:, k // 2 :] = -x[:, : k - k // 2]
            weight[:, k // 2 :] = weight[:, : k - k // 2]
        way(out, x, weight, bias)
        for start in range(0, shape.rows, COMPARED_ROWS):
            some = x[start : start + COMPARED_ROWS]
            found, right = out[start : start + COMPARED_ROWS], expected[: len(some)]
            matmul_into(right, some, weight, bias, REFERENCE)
            if not torch.equal(found.view(bits), right.view(bits)):
                return False
    return True


def _operands(shape: Shape) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    n, k, rows, has_bias, out_dtype, device = shape
    generator = torch.Generator(device).manual_seed(0)
    x, weight = (
        torch.randn(count, k, dtype=torch.bfloat16, device=device, generator=generator)
        for count in (rows, n)
    )
    bias = torch.linspace(-1e-4, 1e-4, n, device=device).bfloat16() if has_bias else None
    return x, weight, bias, x.new_empty(rows, n, dtype=out_dtype)


def fastest(ways: Sequence[Gemm], shape: Shape) -> Gemm:
    """By median time, in turns (`turns`), for weights that lie in memory; recorded, as decoding
    steps are.

    Ways that are close to each other part only when they keep the GPU busy for long, as its clock
    then falls.
    """
    x, weight, bias, out = _operands(shape)
    one_s = max(weight.nbytes / BYTES_PER_S, 2 * shape.rows * weight.numel() / FLOPS_PER_S)
    calls = min(max(int(TURN_S / one_s), 1), MOST_CALLS)
    cache_bytes = torch.cuda.get_device_properties(shape.device).L2_cache_size
    num_copies = min(-(-L2_ROOM * cache_bytes // weight.nbytes), calls) - 1
    weights = [weight, *(weight.clone() for _ in range(num_copies))]

    def work(way: Gemm) -> None:
        for call in range(calls):
            way(out, x, weights[call % len(weights)], bias)

    memory, left = torch.cuda.graph_pool_handle(), []
    for way in ways:
        work(way)
        left.append((way, capture(partial(work, way), memory)[0].replay))
    for turns, num_kept in ROUNDS:
        times = seconds([replay for _, replay in left], turns, warm_up=1)
        order = sorted(range(len(left)), key=times.__getitem__)
        left = [left[index] for index in order[:num_kept]]
    return left[0][0]
