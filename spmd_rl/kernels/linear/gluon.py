"""GEMMs of few rows on NVIDIA Hopper in Gluon, for kernels that follow each other in a CUDA graph.

A program asks for the first tiles of its weight before it waits for the kernel ahead. From then on
it keeps a deep ring of tiles on their way, so memory is not idle between two products. Tiles of the
weight are the first operand of wgmma, rows of x the second. Each element has an ascending
chain over K, or one for each part of K, with the bits of `triton_gemm`.

Asking early is allowed only while a graph is recorded, and only for a weight that no kernel of the
graph writes: whatever wrote it has ended when the graph begins. Elsewhere the weight is asked for
after the wait.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spmd_rl.kernels.linear.tiles import PART, Ring
from spmd_rl.kernels.runtime.padding import row_stride
from spmd_rl.kernels.runtime.pdl import overlapping

WIDTH = gl.constexpr(PART)
HEIGHT = gl.constexpr(64)  # rows of wgmma's first operand
FLAT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
BOX = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3))


def ring_matmul_into(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ring: Ring,
    gated: bool = False,
    chains: int = 1,
) -> None:
    """Multiply as `triton_gemm.matmul_into` does.

    Operands are bf16 with dense rows, and K a multiple of `PART`, or of the steps of all `chains`.
    """
    (m, k), n = x.shape, out.shape[1]
    steps = triton.cdiv(k, ring.k)
    _ring_matmul[(triton.cdiv(m, ring.m) * triton.cdiv(n, ring.n),)](
        _in_parts(x, ring.m, ring.k), _in_parts(weight, ring.n, ring.k),
        out if bias is None else bias.contiguous(), out, m, n, k, out.stride(0),
        torch.cuda.is_current_stream_capturing(), bias is not None, gated, chains,
        ring.late and ring.stages < steps, ring.m, ring.n, ring.k // PART, min(ring.stages, steps),
        num_warps=ring.warps, enable_fp_fusion=not gated, **overlapping(),
    )  # fmt: skip


def _in_parts(matrix: Tensor, height: int, width: int) -> TensorDescriptor:
    """Describe `matrix` for copies of [height, width].

    They lie in shared memory as [width / PART, height, PART]. What lies beyond the matrix is zero
    and costs no memory traffic.
    """
    num_rows, k = matrix.shape
    shape, strides = [k // PART, num_rows, PART], [PART, row_stride(matrix), 1]
    return TensorDescriptor(matrix, shape, strides, [width // PART, height, PART], BOX.value)


def _kernel_name(proxy) -> str:
    """Name the kernel in profiles after its tile and the number of stages."""
    constants = proxy.constants
    m, n, k = constants["TILE_M"], constants["TILE_N"], constants["PARTS"] * PART
    return f"_ring_matmul_{m}x{n}x{k}x{constants['STAGES']}"


@gluon.jit(do_not_specialize=["m", "k", "early"], repr=_kernel_name)
def _ring_matmul(
    x, weight, bias, out, m, n, k, out_stride, early,
    HAS_BIAS: gl.constexpr, GATED: gl.constexpr, CHAINS: gl.constexpr, LATE: gl.constexpr,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    num_warps: gl.constexpr,
) -> None:  # fmt: skip
    HALVES: gl.constexpr = 2 if GATED else 1
    # rows that `_part` reads behind the last tile
    BEYOND: gl.constexpr = HEIGHT - TILE_N if TILE_N < HEIGHT else 0
    weights = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES * HALVES * PARTS * TILE_N + BEYOND, WIDTH], FLAT
    )
    weights = weights._reinterpret(gl.bfloat16, [STAGES * HALVES, PARTS * TILE_N, WIDTH], FLAT)
    rows = gl.allocate_shared_memory(gl.bfloat16, [STAGES, PARTS * TILE_M, WIDTH], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    tiles_m = gl.cdiv(m, TILE_M)
    first_row = gl.program_id(0) % tiles_m * TILE_M
    first_column = gl.program_id(0) // tiles_m * TILE_N
    steps = gl.cdiv(k, PARTS * WIDTH)

    _fill(
        x, weight, rows, weights, ready, early, steps, first_row, first_column, n,
        HALVES, PARTS, STAGES, LATE,
    )  # fmt: skip

    shape: gl.constexpr = [max(TILE_N, HEIGHT), TILE_M]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, TILE_M, 16])
    zeros = gl.zeros(shape, gl.float32, layout)
    ones, twos, fours = zeros, zeros, zeros
    length = steps // CHAINS
    for chain in gl.static_range(CHAINS):
        total, up_total = _chain(
            x, weight, rows, weights, ready, zeros, chain * length, (chain + 1) * length, steps,
            first_row, first_column, n, GATED, PARTS, STAGES, LATE, TILE_M, TILE_N,
        )  # fmt: skip
        if CHAINS > 1:
            total, ones, twos, fours = _with_neighbours(total, ones, twos, fours, chain)
    if GATED:
        total = _gated(total, up_total)
    _store(total, bias, out, m, n, out_stride, first_row, first_column, HAS_BIAS, TILE_N, layout)


@gluon.jit
def _chain(
    x, weight, rows, weights, ready, zeros, begin, end, steps, first_row, first_column, n,
    GATED: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, LATE: gl.constexpr,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """Return the sums of the steps from `begin` to `end`: of the weight, or of its two halves."""
    HALVES: gl.constexpr = 2 if GATED else 1
    total = warpgroup_mma_init(zeros)
    up_total = total
    for step in range(begin, end):
        slot = step % STAGES
        mbarrier.wait(ready.index(slot), step // STAGES & 1)
        for part in gl.static_range(PARTS):
            b = _part(rows.index(slot), part, TILE_M, TILE_M).permute((1, 0))
            a = _part(weights.index(slot * HALVES), part, TILE_N, zeros.shape[0])
            total = warpgroup_mma(a, b, total, is_async=True)
            if GATED:
                a = _part(weights.index(slot * HALVES + 1), part, TILE_N, zeros.shape[0])
                up_total = warpgroup_mma(a, b, up_total, is_async=True)
            if part == 0:
                total, up_total = _all_but(HALVES, total, up_total, GATED)
                total, up_total = warpgroup_mma_init(total), warpgroup_mma_init(up_total)
                _refill(
                    x, weight, rows, weights, ready, step, steps, first_row, first_column, n,
                    HALVES, PARTS, STAGES, LATE,
                )  # fmt: skip
    return _all_but(0, total, up_total, GATED)


@gluon.jit
def _fill(
    x, weight, rows, weights, ready, early, steps, first_row, first_column, n,
    HALVES: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, LATE: gl.constexpr,
) -> None:  # fmt: skip
    """Ask for the tiles of all stages: the weight's before the wait if allowed, x's after it."""
    if not LATE:
        gdc_launch_dependents()
    if early == 0:
        gdc_wait()
    for step in gl.static_range(STAGES):
        bar, wanted = ready.index(step), step < steps
        _ask_weight(x, weight, weights, bar, step, step, wanted, first_column, n, HALVES)
    gdc_wait()
    for step in gl.static_range(STAGES):
        _copy(x, [step * PARTS, first_row, 0], ready.index(step), rows.index(step), step < steps)


@gluon.jit
def _refill(
    x, weight, rows, weights, ready, step, steps, first_row, first_column, n,
    HALVES: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, LATE: gl.constexpr,
) -> None:  # fmt: skip
    """Ask for the tiles that follow those of the stage before `step`, which has been read."""
    later = step + (STAGES - 1)
    wanted, freed = (step > 0) & (later < steps), later % STAGES
    bar = ready.index(freed)
    _ask_weight(x, weight, weights, bar, later, freed, wanted, first_column, n, HALVES)
    _copy(x, [later * PARTS, first_row, 0], bar, rows.index(freed), wanted)
    if LATE:
        _let_next_begin(later == steps - 1)


@gluon.jit
def _with_neighbours(total, ones, twos, fours, chain: gl.constexpr) -> gl.tuple:
    """Add sums of one, two and four chains to the neighbours that `total` completes.

    Returns the sum, and what waits for a neighbour: the last sums of one, two and four chains.
    """
    if chain % 2 == 1:
        total = _added_now(ones, total)
    if chain % 4 == 3:
        total = _added_now(twos, total)
    if chain % 8 == 7:
        total = _added_now(fours, total)
    if chain % 2 == 0:
        ones = total
    elif chain % 4 == 1:
        twos = total
    elif chain % 8 == 3:
        fours = total
    return total, ones, twos, fours


@gluon.jit
def _added_now(a, b) -> gl.tensor:
    """Return a + b, added here: left to itself, the compiler keeps all chains until the end."""
    return gl.inline_asm_elementwise(
        "add.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _gated(gate, up) -> gl.tensor:
    """Return SiLU(gate) * up, both rounded before."""
    gate, up = gate.to(gl.bfloat16).to(gl.float32), up.to(gl.bfloat16).to(gl.float32)
    return gate / (1.0 + gl.exp(-gate)) * up


@gluon.jit
def _store(
    total, bias, out, m, n, out_stride, first_row, first_column,
    HAS_BIAS: gl.constexpr, TILE_N: gl.constexpr, layout: gl.constexpr,
) -> None:  # fmt: skip
    """Add the bias to the sums [rows of the weight, rows of x], round and store them."""
    within = gl.arange(0, total.shape[0], gl.SliceLayout(1, layout))
    column = first_column + within
    row = first_row + gl.arange(0, total.shape[1], gl.SliceLayout(0, layout))
    stored = (within < TILE_N) & (column < n)
    if HAS_BIAS:
        total += gl.load(bias + column, mask=stored, other=0.0).to(gl.float32)[:, None]
    at = out + row.to(gl.int64)[None, :] * out_stride + column[:, None]
    gl.store(at, total.to(out.dtype.element_ty), mask=stored[:, None] & (row < m)[None, :])


@gluon.jit
def _let_next_begin(now) -> None:
    if now:
        gdc_launch_dependents()


@gluon.jit
def _all_but(PENDING: gl.constexpr, total, up_total, GATED: gl.constexpr) -> gl.tuple:
    """Return the accumulators once at most the last `PENDING` steps into them are under way."""
    if GATED:
        total, up_total = warpgroup_mma_wait(PENDING, (total, up_total))
    else:
        total = warpgroup_mma_wait(PENDING, (total,))
        up_total = total
    return total, up_total


@gluon.jit
def _ask_weight(
    x, weight, weights, bar, step, slot, wanted, first_column, n, HALVES: gl.constexpr
) -> None:
    """Announce a step's bytes of x and of the weight, and ask for the weight's."""
    mbarrier.expect(bar, x.block_type.nbytes + HALVES * weight.block_type.nbytes, wanted)
    for half in gl.static_range(HALVES):
        at = [step * weight.block_type.shape[0], half * n + first_column, 0]
        _copy(weight, at, bar, weights.index(slot * HALVES + half), wanted)


@gluon.jit
def _copy(matrix, at, bar, to, wanted) -> None:
    to = to._reinterpret(gl.bfloat16, matrix.block_type.shape, BOX)
    tma.async_copy_global_to_shared(matrix, at, bar, to, wanted)


@gluon.jit
def _part(
    tile, part: gl.constexpr, HEIGHT_OF_PART: gl.constexpr, TALL: gl.constexpr
) -> gl.shared_memory_descriptor:
    """Return one part of K of a tile.

    Where wgmma takes more rows, it includes what lies behind the part; those sums are not stored.
    """
    parts = tile._reinterpret(
        gl.bfloat16, [tile.shape[0] // HEIGHT_OF_PART, HEIGHT_OF_PART, WIDTH], FLAT
    )
    return parts.index(part)._reinterpret(gl.bfloat16, [TALL, WIDTH], FLAT)
