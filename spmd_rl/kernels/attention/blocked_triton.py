"""Blocked attention on NVIDIA GPUs where FlashAttention-4 does not run.

A program takes a tile of one sequence's query rows through the blocks of keys, from the first to
the last that one of the rows sees. The tile depends on head size and dtype alone. So a row's
maxima, sums and products follow the same trees in every call, and a block that a row does not see
leaves it unchanged. Sums are scaled down whenever a greater score comes.
Source: Dao et al., FlashAttention (2022), https://arxiv.org/abs/2205.14135.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.runtime.padding import dense

LARGE_HEAD = 128


class BlockTile(NamedTuple):
    """Sizes of a program: query rows, keys of a block, warps, and stages of the load pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


def block_tile(dtype: torch.dtype, dim: int) -> BlockTile:
    """Return a tile that fits the shared memory of every GPU since Ampere."""
    if dtype == torch.float32:  # no tensor core multiplies it exactly
        return BlockTile(16, 32, 4, 1)
    return BlockTile(64, 64, 4, 2 if dim <= LARGE_HEAD else 1)


def attend_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, num_used: int, scale: float
) -> Tensor:
    """Compute softmax(q k^T) v in float32.

    Weights are rounded to the values' dtype, and the result once. Keys that no row of a tile sees
    are not read.
    Shape: q [K, B, R, D], k and v [K, B, S, D]. visible [B, R] is how many keys a row sees, from
    the first; 1 to S. Returns [K, B, R, D], unset in rows from `num_used` on.
    """
    q, k, v, visible = map(dense, (q, k, v, visible))
    num_heads, batch, num_rows, dim = q.shape
    out, tile = torch.empty_like(q), block_tile(q.dtype, dim)
    _attend[(num_heads * batch * triton.cdiv(num_used, tile.rows),)](
        q, k, v, visible, out, scale * math.log2(math.e), batch, num_rows, num_used, k.shape[2],
        dim, triton.next_power_of_2(max(dim, 16)), tile.rows, tile.keys,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["batch", "num_rows", "num_used", "num_keys"])
def _attend(
    q, k, v, visible, out, scale, batch, num_rows, num_used, num_keys,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
) -> None:  # fmt: skip
    num_tiles = tl.cdiv(num_used, ROWS)
    head, tile = (tl.program_id(0) // num_tiles).to(tl.int64), tl.program_id(0) % num_tiles
    row, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_used, is_there = row < num_used, column < DIM
    seen = tl.load(visible + head % batch * num_rows + row, mask=is_used, other=1)
    last = tl.max(seen, 0)
    at = (head * num_rows + row)[:, None] * DIM + column[None, :]
    here = is_used[:, None] & is_there[None, :]
    query = tl.load(q + at, mask=here, other=0.0)
    best = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, last, KEYS):
        place = start + tl.arange(0, KEYS)
        of_key = (head * num_keys + place)[:, None] * DIM + column[None, :]
        is_read = (place < last)[:, None] & is_there[None, :]
        key = tl.load(k + of_key, mask=is_read, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(place[None, :] < seen[:, None], score, -float("inf"))
        better = tl.maximum(best, tl.max(score, 1))
        weight, kept = tl.exp2(score - better[:, None]), tl.exp2(best - better)
        total = total * kept + tl.sum(weight, 1)
        value = tl.load(v + of_key, mask=is_read, other=0.0)
        weighted = tl.dot(
            weight.to(value.dtype), value, weighted * kept[:, None], input_precision="ieee"
        )
        best = better
    result = weighted / total[:, None]
    result = tl.where(result == 0, 0.0, result)  # a block that a row does not see makes +0 of -0
    tl.store(out + at, result.to(out.dtype.element_ty), mask=here)
