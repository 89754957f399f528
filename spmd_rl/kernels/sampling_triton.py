"""Gumbel-max on NVIDIA GPUs in one pass over the logits: noise is made, used and forgotten in registers.

The noise is defined in float64, which is slow to make for a whole vocabulary. So a pass with a float32 estimate, good
to far better than MARGIN, keeps each lane's best entry, and only entries near the top get the exact noise. Should a
lane have had a second such entry, its split is done again with exact noise throughout. A maximum is exact, so
neither this nor the split of the vocabulary shows in the result.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from spmd_rl.kernels.tile import dense

BLOCK = 512
NUM_PROGRAMS = 1024
MARGIN = tl.constexpr(1e-2)
GAMMA = tl.constexpr(0x9E3779B97F4A7C15)


def gumbel_argmax(scores: Tensor, inv_temperature: Tensor, keys: Tensor, greedy: Tensor | None) -> Tensor:
    """argmax of scores * inv_temperature + noise(keys), or of plain scores in greedy rows; ties to the lowest id.

    Shape: scores [M, V] fp32, all else [M]; returns [M] int64.
    """
    num_rows, vocab = scores.shape
    splits = min(max(NUM_PROGRAMS // num_rows, 8), triton.cdiv(vocab, BLOCK))
    best = scores.new_empty(num_rows, splits)
    token = torch.empty(num_rows, splits, dtype=torch.int64, device=scores.device)
    flags = torch.zeros(num_rows, dtype=torch.bool, device=scores.device) if greedy is None else greedy
    _best_of_split[(num_rows, splits)](
        dense(scores), inv_temperature, keys, flags, best, token, vocab,
        triton.cdiv(vocab, splits * BLOCK) * BLOCK, BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    top = best.amax(dim=1, keepdim=True)
    return torch.where(best == top, token, vocab - 1).amin(dim=1)


@triton.jit(do_not_specialize=["split_size"])
def _best_of_split(scores, inv_temperature, keys, greedy, best, token, vocab, split_size, BLOCK: tl.constexpr) -> None:
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_greedy, key = tl.load(greedy + row), tl.load(keys + row)
    scale = tl.where(is_greedy, 1.0, tl.load(inv_temperature + row))
    logits = scores + row * vocab
    first = split * split_size + tl.arange(0, BLOCK)
    top, second = tl.full((BLOCK,), float("-inf"), tl.float32), tl.full((BLOCK,), float("-inf"), tl.float32)
    top_id = tl.full((BLOCK,), 0, tl.int32) + vocab - 1
    for start in range(0, split_size, BLOCK):
        column = first + start
        estimate = tl.load(logits + column, mask=column < vocab, other=float("-inf")) * scale
        if not is_greedy:
            estimate += _rough_noise(_bits(key, column))
        better = estimate > top
        second = tl.maximum(second, tl.where(better, top, estimate))
        top_id = tl.where(better, column, top_id)
        top = tl.where(better, estimate, top)
    highest = tl.max(top, axis=0)
    near = highest - MARGIN - 1e-5 * tl.abs(highest)
    if tl.max(second, axis=0) < near:
        exact = tl.load(logits + top_id, mask=top >= near, other=float("-inf")) * scale
        if not is_greedy:
            exact += _noise(_bits(key, top_id))
        top = exact
    else:
        top = tl.full((BLOCK,), float("-inf"), tl.float32)
        top_id = tl.full((BLOCK,), 0, tl.int32) + vocab - 1
        for start in range(0, split_size, BLOCK):
            column = first + start
            exact = tl.load(logits + column, mask=column < vocab, other=float("-inf")) * scale
            if not is_greedy:
                exact += _noise(_bits(key, column))
            better = exact > top
            top_id = tl.where(better, column, top_id)
            top = tl.where(better, exact, top)
    highest = tl.max(top, axis=0)
    at = row * tl.num_programs(1) + split
    tl.store(best + at, highest)
    tl.store(token + at, tl.min(tl.where(top == highest, top_id, vocab - 1), axis=0).to(tl.int64))


@triton.jit
def _bits(key, column) -> tl.tensor:
    """32 random bits, as in `sampling.gumbel_noise`."""
    x = key.to(tl.uint64) + (column + 1).to(tl.uint64) * GAMMA
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return ((x ^ (x >> 31)) >> 32).to(tl.uint32)


@triton.jit
def _noise(bits) -> tl.tensor:
    v = (bits.to(tl.float64) + 0.5) * 2.0**-32
    return (-tl.log(-libdevice.log1p(-v))).to(tl.float32)


@triton.jit
def _rough_noise(bits) -> tl.tensor:
    v = (bits.to(tl.float32) + 0.5) * 2.0**-32
    rest = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.0**-32
    return -tl.log(tl.where(v < 0.01, v * (1.0 + v * (0.5 + v * 0.33333334)), -tl.log(rest)))
