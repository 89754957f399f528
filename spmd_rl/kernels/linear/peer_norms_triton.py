"""Sums of ranks that share a layer, added to the residual stream and normed in the same kernel.

A program has whole rows. It reads the parts of all ranks as peer_sums_triton.py does, and rounds
their sum. With that it does what the kernel of the norm does with x, in the same tile. So the bits
are those of the two kernels, one behind the other.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.linear.peer_sums_triton import PeerBuffers, total_of_peers
from spmd_rl.kernels.rowwise.norm_triton import NUM_WARPS, norm_of_tile, norm_tile
from spmd_rl.kernels.runtime.padding import dense
from spmd_rl.kernels.runtime.pdl import overlapping, wait


class NormedRows(NamedTuple):
    """Rows of the residual stream before a sum and behind it, and of its norm; all contiguous.

    Shape: residual, summed and out [T, N].
    """

    residual: Tensor
    summed: Tensor
    out: Tensor


def norm_of_peers(
    every: NormedRows, rows: range, bias: Tensor | None, weight: Tensor, eps: float,
    buffers: PeerBuffers,
) -> None:  # fmt: skip
    """Set `rows` of `summed` and `out`, whose sums over ranks begin at the first row of buffers.

    The first is the residual plus the rounded sum over ranks and bias, the second is its norm.
    Shape: bias and weight [N].
    """
    size = every.out.shape[1]
    tile, block = norm_tile(size)
    _norm_of_peers[(triton.cdiv(len(rows), tile),)](
        bias, buffers.peers, buffers.turns, every.residual, dense(weight), every.out, every.summed,
        rows.start, len(rows), eps, buffers.num_words, len(buffers.peers), size, tile, block,
        num_warps=NUM_WARPS, enable_fp_fusion=False, **overlapping(),
    )  # fmt: skip


# Rows are counted and not sliced: a kernel's layout, and so its sums, depend on how memory is
# aligned.
@triton.jit(do_not_specialize=["first", "num_rows"])
def _norm_of_peers(
    bias, peers, turns, residual, weight, out, summed, first, num_rows, eps, num_words,
    RANKS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    wait()
    number = tl.load(turns + 1)
    if tl.program_id(0) == 0:
        tl.store(turns, 1 - number)
    at = row[:, None] * SIZE + column[None, :]
    total = total_of_peers(peers, number * num_words, at, inside, RANKS)
    if bias is not None:
        total += tl.load(bias + column, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
    given = total.to(residual.dtype.element_ty)
    at = (first + row)[:, None] * SIZE + column[None, :]
    norm_of_tile(given, residual, weight, out, summed, at, inside, column, eps, SIZE)
