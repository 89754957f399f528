"""Gumbel-max on NVIDIA GPUs in one pass over the logits: noise is made, used and forgotten in registers.

A maximum is exact, so neither the split of the vocabulary nor the order of comparisons shows in the result.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from spmd_rl.kernels.tile import dense

NUM_SPLITS = 16
BLOCK = 512


def gumbel_argmax(scores: Tensor, inv_temperature: Tensor, keys: Tensor, greedy: Tensor | None) -> Tensor:
    """argmax of scores * inv_temperature + noise(keys), or of plain scores in greedy rows; ties to the lowest id.

    Shape: scores [M, V] fp32, all else [M]; returns [M] int64.
    """
    num_rows, vocab = scores.shape
    best = scores.new_empty(num_rows, NUM_SPLITS)
    token = torch.empty(num_rows, NUM_SPLITS, dtype=torch.int64, device=scores.device)
    flags = torch.zeros(num_rows, dtype=torch.bool, device=scores.device) if greedy is None else greedy
    _best_of_split[(num_rows, NUM_SPLITS)](
        dense(scores), inv_temperature, keys, flags, best, token, vocab,
        triton.cdiv(vocab, NUM_SPLITS * BLOCK) * BLOCK, BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    top = best.amax(dim=1, keepdim=True)
    return torch.where(best == top, token, vocab - 1).amin(dim=1)


@triton.jit
def _best_of_split(
    scores, inv_temperature, keys, greedy, best, token, vocab, SPLIT: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_greedy = tl.load(greedy + row)
    scale = tl.where(is_greedy, 1.0, tl.load(inv_temperature + row))
    key = tl.load(keys + row)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    top_id = tl.full((BLOCK,), 0, tl.int64) + vocab - 1
    for start in range(0, SPLIT, BLOCK):
        column = (split * SPLIT + start + tl.arange(0, BLOCK)).to(tl.int64)
        inside = column < vocab
        score = tl.load(scores + row * vocab + column, mask=inside, other=float("-inf")) * scale
        if not is_greedy:
            score += _noise(key, column)
        better = inside & (score > top)
        top = tl.where(better, score, top)
        top_id = tl.where(better, column, top_id)
    highest = tl.max(top, axis=0)
    tl.store(best + row * tl.num_programs(1) + split, highest)
    tl.store(token + row * tl.num_programs(1) + split, tl.min(tl.where(top == highest, top_id, vocab - 1), axis=0))


@triton.jit
def _noise(key, column):
    """The same noise as `sampling.gumbel_noise`."""
    x = key.to(tl.uint64) + (column + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    bits = (x ^ (x >> 31)) >> 32
    v = (bits.to(tl.float64) + 0.5) * 2.0**-32
    return (-tl.log(-libdevice.log1p(-v))).to(tl.float32)
