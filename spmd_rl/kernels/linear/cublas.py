"""Choice of the fastest cuBLAS algorithm that has the contract's bits for a shape.

An algorithm that says it cuts K is left out. The others are compared with the reference kernel
twice: for ordinary data, then for data whose halves cancel, so that only the chain's rounding is
left. All that pass give the same bits, so another process may find another one the fastest.

An algorithm is one kernel for all numbers of rows, so it is compared for the most and for the
fewest rows that it will have. The last two of a race meet alone, because what ran before decides on
the GPU's clock.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from spmd_rl.kernels.linear.cublaslt import Gemm, Shape, Unsupported, propose_algorithms
from spmd_rl.kernels.linear.tiles import REFERENCE
from spmd_rl.kernels.runtime.cuda_graph import capture
from spmd_rl.kernels.runtime.interleaved_timing import seconds

COMPARED_ROWS = 1024
ROUNDS = ((9, 4), (41, 2), (41, 1))  # timed turns of each, and how many of the fastest go on
# A graph of calls takes about this long on an H200, so that its launch does not count.
TURN_S = 1e-3
BYTES_PER_S, FLOPS_PER_S = 4e12, 8e14
MOST_CALLS = 64
L2_MULTIPLE = 2  # weights that fill the L2 cache this often are read from memory


def race(shape: Shape, least_rows: int, ours: Gemm) -> Gemm:
    """Return the fastest of `ours` and of the algorithms that have the bits.

    Raises: torch.OutOfMemoryError, and Unsupported as in `choose`.
    """
    ways = [
        way
        for way in propose_algorithms(shape)
        if way.splits <= 1 and has_reference_bits(way, shape)
    ]
    if least_rows != shape.rows:
        ways = [way for way in ways if serves(way, shape._replace(rows=least_rows))]
    return fastest([ours, *ways], shape) if ways else ours


@torch.no_grad()
def choose(
    shape: Shape, least_rows: int, ours: Gemm, race: Callable[[Shape, int, Gemm], Gemm] = race
) -> Gemm | None:
    """Choose an algorithm for `least_rows` up to the shape's number of rows.

    Returns None where `ours` is the fastest, where no algorithm has its bits, and with a warning
    where the GPU has no memory left to compare them. Must not run while a graph is recorded.

    Raises: Unsupported where cuBLAS does not take what it proposed for the shape itself.
    """
    try:
        best = race(shape, least_rows, ours)
    except torch.OutOfMemoryError:
        warnings.warn(
            f"no memory to compare cuBLAS's ways for {shape}: a slower kernel multiplies",
            stacklevel=2,
        )
        return None
    return None if best is ours else best


def serves(way: Gemm, shape: Shape) -> bool:
    """Return whether an algorithm takes the shape and has the bits for it."""
    try:
        return has_reference_bits(way, shape)
    except Unsupported:
        return False


def has_reference_bits(gemm: Gemm, shape: Shape) -> bool:
    """Return whether `gemm` gives the reference kernel's bits for this shape."""
    from spmd_rl.kernels.linear.triton_gemm import matmul_into

    x, weight, bias, out = _operands(shape)
    expected, k = out.new_empty(min(shape.rows, COMPARED_ROWS), shape.n), shape.k
    bits = torch.int16 if shape.out_dtype == torch.bfloat16 else torch.int32
    for cancelling in (False, True):
        if cancelling:
            x[:, k // 2 :] = -x[:, : k - k // 2]
            weight[:, k // 2 :] = weight[:, : k - k // 2]
        gemm(out, x, weight, bias)
        for start in range(0, shape.rows, COMPARED_ROWS):
            part = x[start : start + COMPARED_ROWS]
            found, reference = out[start : start + COMPARED_ROWS], expected[: len(part)]
            matmul_into(reference, part, weight, bias, REFERENCE)
            if not torch.equal(found.view(bits), reference.view(bits)):
                return False
    return True


def _operands(shape: Shape) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    n, k, rows, has_bias, out_dtype, device, width = shape
    generator = torch.Generator(device).manual_seed(0)
    x, weight = (
        torch.randn(count, width or k, dtype=torch.bfloat16, device=device, generator=generator)[
            :, :k
        ]
        for count in (rows, n)
    )
    bias = torch.linspace(-1e-4, 1e-4, n, device=device).bfloat16() if has_bias else None
    return x, weight, bias, x.new_empty(rows, n, dtype=out_dtype)


def _copy(x: Tensor) -> Tensor:
    """Copy columns of a matrix, with as much room between their rows."""
    return x.new_empty_strided(x.shape, x.stride()).copy_(x)


def fastest(ways: Sequence[Gemm], shape: Shape) -> Gemm:
    """Return the fastest by median time, in interleaved turns, from recorded graphs.

    Weights are read from memory, as decoding steps do. Close candidates part only when they keep
    the GPU busy for long, as its clock falls then.
    """
    x, weight, bias, out = _operands(shape)
    one_s = max(weight.nbytes / BYTES_PER_S, 2 * shape.rows * weight.numel() / FLOPS_PER_S)
    calls = min(max(int(TURN_S / one_s), 1), MOST_CALLS)
    cache_bytes = torch.cuda.get_device_properties(shape.device).L2_cache_size
    num_copies = min(-(-L2_MULTIPLE * cache_bytes // weight.nbytes), calls) - 1
    weights = [weight, *(_copy(weight) for _ in range(num_copies))]

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
