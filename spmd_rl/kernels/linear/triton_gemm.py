"""GEMM in Triton on NVIDIA GPUs, with an ascending chain over K for every output element.

The tile is free: on Hopper, mma.sync and wgmma round alike, and so does the transposed product
(measured, docs/numerics.md). So small batches take narrow tiles and large batches wide ones, with
the same bits. The chain is not free: K is split only where the contract has parts, each of which is
a chain (row_shards.py). Rows, columns and steps of K beyond the matrices are read as zeros.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from spmd_rl.kernels.linear.tiles import LARGE_BYTES, Tile
from spmd_rl.kernels.rowwise.activation_triton import silu_times
from spmd_rl.kernels.runtime.padding import dense_rows, row_stride
from spmd_rl.kernels.runtime.pdl import overlapping, wait

ROW_GROUP = 8
COPY_UNIT = 8  # numbers in 16 bytes: the copy engine moves rows of whole units


def matmul_into(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tile: Tile,
    gated: bool = False,
    chains: int = 1,
) -> None:
    """Write x @ weight.T + bias to `out`, accumulated in fp32 and rounded once to out's dtype.

    If `gated`, the weight's halves make a gate and an up projection, which are rounded. The result
    is SiLU(gate) * up, without bias. K may be cut into 2, 4 or 8 `chains`, each of whole steps,
    whose sums are added in the tree of `row_shards.py`.
    Shape: out [M, N] with contiguous rows, x [M, K], weight [N, K] or if gated [2 N, K], bias [N].
    """
    (m, k), n = x.shape, out.shape[1]
    if k % COPY_UNIT:
        x, weight = (F.pad(one, (0, COPY_UNIT - k % COPY_UNIT)) for one in (x, weight))
    early = overlapping() if weight.nbytes < LARGE_BYTES else {}
    _matmul[(triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n),)](
        _in_tiles(x, tile.m, tile.k), _in_tiles(weight, tile.n, tile.k),
        out if bias is None else bias.contiguous(), out, m, n, k, out.stride(0),
        bias is not None, gated, chains, tile.swap, tile.m, tile.n, tile.k, ROW_GROUP,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=not gated, **early,
    )  # fmt: skip


def _in_tiles(matrix: Tensor, height: int, width: int) -> TensorDescriptor:
    """Describe `matrix` for copies of [height, width]; beyond its columns they are zero."""
    matrix = dense_rows(matrix)
    strides = [row_stride(matrix), 1]
    return TensorDescriptor(matrix, list(matrix.shape), strides, [height, width])


def _kernel_name(proxy) -> str:
    """Name the kernel in profiles after its tile."""
    constants = proxy.constants
    m, n, k = constants["TILE_M"], constants["TILE_N"], constants["TILE_K"]
    return f"_matmul_{m}x{n}x{k}" + "_swap" * bool(constants["SWAP"])


@triton.jit(do_not_specialize=["m", "k"], repr=_kernel_name)
def _matmul(
    x, weight, bias, out, m, n, k, out_stride,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, CHAINS: tl.constexpr, SWAP: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N)
    group = tl.program_id(0) // (GROUP * tiles_n)
    height = min(tiles_m - group * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * tiles_n)
    first_row = (group * GROUP + within % height) * TILE_M
    first_column = (within // height) * TILE_N
    wait()
    zeros = tl.zeros((TILE_N, TILE_M) if SWAP else (TILE_M, TILE_N), tl.float32)
    ones, twos, fours = zeros, zeros, zeros
    length = k // CHAINS
    for chain in tl.static_range(CHAINS):
        total, up_total = zeros, zeros
        for start in range(chain * length, (chain + 1) * length, TILE_K):
            a = x.load([first_row, start])
            total = _step(total, a, weight.load([first_column, start]), SWAP)
            if GATED:
                up_total = _step(up_total, a, weight.load([n + first_column, start]), SWAP)
        if CHAINS > 1:
            total, ones, twos, fours = _with_neighbours(total, ones, twos, fours, chain)
    if GATED:
        total, up_total = total.to(out.dtype.element_ty), up_total.to(out.dtype.element_ty)
        total = silu_times(total.to(tl.float32), up_total.to(tl.float32))
    if SWAP:
        total = tl.trans(total)
    row, column = first_row + tl.arange(0, TILE_M), first_column + tl.arange(0, TILE_N)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    at = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(row < m)[:, None] & (column < n)[None, :])


@triton.jit
def _with_neighbours(total, ones, twos, fours, chain: tl.constexpr) -> tl.tuple:
    """Do what the function of this name in `gluon.py` does."""
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


@triton.jit
def _added_now(a, b) -> tl.tensor:
    """Do what the function of this name in `gluon.py` does."""
    return tl.inline_asm_elementwise(
        "add.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, is_pure=False, pack=1
    )


@triton.jit
def _step(total, a, b, SWAP: tl.constexpr) -> tl.tensor:
    return tl.dot(b, tl.trans(a), total) if SWAP else tl.dot(a, tl.trans(b), total)
