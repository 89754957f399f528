"""Attention to latents on NVIDIA GPUs: all heads read one key, and its latent part is the value.

A program takes a tile of one sequence's rows, which are pairs of a token and a head, through the
blocks of its keys, from the first to the last that one of the rows sees. The tile depends on sizes
and dtype alone, and one kernel serves packed sequences and pages. So a row's maxima, sums and
products follow the same trees in every call, and a block that a row does not see leaves it
unchanged.
Source: DeepSeek-AI, DeepSeek-V2 (2024), appendix C; Dao et al., FlashAttention (2022).
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.latents.sizes import LatentSizes
from spmd_rl.kernels.row_tiles.tiles import PAGE, RowTiles
from spmd_rl.kernels.row_tiles.tiles_triton import LOG2_E, rows_of
from spmd_rl.kernels.runtime.padding import dense


class LatentTile(NamedTuple):
    """Sizes of a program: rows, keys of a block, warps, and stages of the load pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


def latent_tile(dtype: torch.dtype) -> LatentTile:
    """Return a tile that fits the shared memory of a Hopper GPU."""
    if dtype == torch.float32:  # no tensor core multiplies it exactly
        return LatentTile(16, 32, 4, 1)
    return LatentTile(64, PAGE, 8, 2)


def constants(sizes: LatentSizes) -> tuple[int, int, int, int]:
    """Return both parts of a key, and the powers of two that hold them."""
    latent, rotary = (triton.next_power_of_2(max(size, 16)) for size in sizes)
    return *sizes, latent, rotary


def attend_to_latents(
    q: Tensor, keys: Tensor, tiles: RowTiles, sizes: LatentSizes
) -> tuple[Tensor, Tensor]:
    """Compute softmax(q k^T / sqrt(D)) c in float32, where c is the latent part of k.

    Weights are rounded to the dtype of keys, and the result once. Shape: q [T', H, D], keys [S, D],
    contiguous. Returns [T', H, C], and the logs to base 2 of the softmaxes' denominators [T', H] in
    fp32; both are unset for tokens of no tile.
    """
    q, tile, heads = dense(q), latent_tile(q.dtype), q.shape[:-1]
    out = q.new_empty(*heads, sizes.latent)
    log_sum = q.new_empty(heads, dtype=torch.float32)
    _attend[(tiles.number,)](
        q, keys, out, log_sum, tiles.table, tiles.pages, tiles.number, tiles.unit, heads[1],
        *constants(sizes), tile.rows, tile.keys, PAGE, **tile.options, enable_fp_fusion=False,
    )  # fmt: skip
    return out, log_sum


@triton.jit
def places_of(
    x, row, is_there, LATENT: tl.constexpr, ROTARY: tl.constexpr, LATENTS: tl.constexpr,
    TURNED: tl.constexpr,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    """Return where both parts of rows [N, D] of x lie, and which elements are there."""
    latent, rotary = tl.arange(0, LATENTS)[None, :], tl.arange(0, TURNED)[None, :]
    at, is_there = x + row.to(tl.int64)[:, None] * (LATENT + ROTARY), is_there[:, None]
    return (
        at + ROTARY + latent,
        is_there & (latent < LATENT),
        at + rotary,
        is_there & (rotary < ROTARY),
    )


@triton.jit
def both_parts(
    x, row, is_read, LATENT: tl.constexpr, ROTARY: tl.constexpr, LATENTS: tl.constexpr,
    TURNED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Return the latent and the rotary parts of rows [N, D] of x."""
    latent, is_latent, rotary, is_rotary = places_of(
        x, row, is_read, LATENT, ROTARY, LATENTS, TURNED
    )
    return tl.load(latent, mask=is_latent, other=0.0), tl.load(rotary, mask=is_rotary, other=0.0)


@triton.jit
def products_of(query, turned, latent, turning) -> tl.tensor:
    """Return the products of queries and keys, by both parts of them."""
    product = tl.dot(query, tl.trans(latent), input_precision="ieee")
    return tl.dot(turned, tl.trans(turning), product, input_precision="ieee")


@triton.jit(do_not_specialize=["num_tiles", "unit"])
def _attend(
    q, keys, out, log_sum, table, pages, num_tiles, unit, HEADS: tl.constexpr,
    LATENT: tl.constexpr, ROTARY: tl.constexpr, LATENTS: tl.constexpr, TURNED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
) -> None:  # fmt: skip
    at, is_used, position, end, page = rows_of(table, num_tiles, HEADS, ROWS)
    query, turned = both_parts(q, at, is_used, LATENT, ROTARY, LATENTS, TURNED)
    best = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, LATENTS], tl.float32)
    for start in range(0, end, KEYS):
        place = start + tl.arange(0, KEYS)
        row = tl.load(pages + page + start // PAGE).to(tl.int64) * unit + place % PAGE
        latent, turning = both_parts(keys, row, place < end, LATENT, ROTARY, LATENTS, TURNED)
        score = products_of(query, turned, latent, turning) * ((LATENT + ROTARY) ** -0.5 * LOG2_E)
        score = tl.where(place[None, :] <= position[:, None], score, -float("inf"))
        better = tl.maximum(best, tl.max(score, 1))
        weight, kept = tl.exp2(score - better[:, None]), tl.exp2(best - better)
        total = total * kept + tl.sum(weight, 1)
        weighted = tl.dot(
            weight.to(latent.dtype), latent, weighted * kept[:, None], input_precision="ieee"
        )
        best = better
    result = weighted / total[:, None]
    result = tl.where(result == 0, 0.0, result)  # a block that a row does not see makes +0 of -0
    column = tl.arange(0, LATENTS)
    to = out + at[:, None] * LATENT + column[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=is_used[:, None] & (column < LATENT)[None])
    tl.store(log_sum + at, best + tl.log2(total), mask=is_used)
