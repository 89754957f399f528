"""Gumbel-max on NVIDIA GPUs in one pass over the logits: noise is made, used and forgotten in registers.

The noise is defined in float64, which is slow to make for a whole vocabulary. So a pass with a float32 estimate, good
to far better than MARGIN, keeps each lane's best entry of a split. The best of all gets the exact noise; should other
lanes come near it, so do they; should a lane have had a second such entry, the split is gone through again. A maximum
is exact, so neither this nor the split of the vocabulary shows in the result.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from spmd_rl.kernels.logprob import NUM_VOCAB_SHARDS, VOCAB_CHUNK
from spmd_rl.kernels.logprob_triton import logprob_forward
from spmd_rl.kernels.overlap_triton import overlapping, wait
from spmd_rl.kernels.tile import dense

BLOCK = 512
NUM_PROGRAMS = 1024
MARGIN = tl.constexpr(1e-3)
GAMMA = tl.constexpr(0x9E3779B97F4A7C15)


def gumbel_argmax(scores: Tensor, inv_temperature: Tensor, keys: Tensor, greedy: Tensor | None) -> Tensor:
    """argmax of scores * inv_temperature + noise(keys), or of plain scores in greedy rows; ties to the lowest id.

    Shape: scores [M, V] fp32, all else [M]; returns [M] int64.
    """
    return _draw(dense(scores), inv_temperature, keys, None, greedy)[0]


def gumbel_argmax_and_logprob(
    logits: Tensor, inv_temperature: Tensor, bases: Tensor, positions: Tensor, greedy: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The draw, and its log-probability, which takes the maxima that the draw has come across.

    Shape: logits [M, V] fp32, all else [M]; returns [M] int64 and [M] fp32.
    """
    logits = dense(logits)
    drawn, maxima = _draw(logits, inv_temperature, bases, positions, greedy)
    return drawn, logprob_forward(logits, drawn, inv_temperature, NUM_VOCAB_SHARDS, VOCAB_CHUNK, maxima)[0]


def _draw(
    scores: Tensor, inv_temperature: Tensor, keys: Tensor, positions: Tensor | None, greedy: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The token of each row, and the greatest scores * inv_temperature of each of its splits."""
    num_rows, vocab = scores.shape
    split_size = triton.cdiv(vocab, max(NUM_PROGRAMS // num_rows, 8) * BLOCK) * BLOCK
    splits = triton.cdiv(vocab, split_size)
    best, maxima = scores.new_empty(2, num_rows, splits)
    token = torch.empty(num_rows, splits, dtype=torch.int32, device=scores.device)
    _best_of_split[(num_rows, splits)](
        scores, inv_temperature, keys, positions, greedy, best, maxima, token, vocab,
        split_size, BLOCK, num_warps=4, enable_fp_fusion=False, **overlapping(),
    )  # fmt: skip
    drawn = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    _best_of_row[(num_rows,)](
        best, token, drawn, vocab, splits, triton.next_power_of_2(splits), num_warps=1, **overlapping()
    )
    return drawn, maxima


@triton.jit(do_not_specialize=["vocab", "splits"])
def _best_of_row(best, token, drawn, vocab, splits, BLOCK: tl.constexpr) -> None:
    row, split = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    wait()
    top = tl.load(best + row * splits + split, mask=split < splits, other=float("-inf"))
    ids = tl.load(token + row * splits + split, mask=split < splits, other=vocab - 1)
    tl.store(drawn + row, tl.min(tl.where(top == tl.max(top, axis=0), ids, vocab - 1), axis=0).to(tl.int64))


@triton.jit(do_not_specialize=["split_size"])
def _best_of_split(
    scores, inv_temperature, keys, positions, greedy, best, maxima, token, vocab, split_size, BLOCK: tl.constexpr
) -> None:
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait()
    key = tl.load(keys + row).to(tl.uint64)
    if positions is not None:
        key = _mix(key + (tl.load(positions + row) + 1).to(tl.uint64) * GAMMA)
    is_greedy = False
    scored_scale = tl.load(inv_temperature + row)
    scale = scored_scale
    if greedy is not None:
        is_greedy = tl.load(greedy + row)
        scale = tl.where(is_greedy, 1.0, scale)
    logits = scores + row * vocab
    first = split * split_size + tl.arange(0, BLOCK)
    top, second = tl.full((BLOCK,), float("-inf"), tl.float32), tl.full((BLOCK,), float("-inf"), tl.float32)
    top_id = tl.full((BLOCK,), 0, tl.int32) + vocab - 1
    maximum = tl.full((BLOCK,), float("-inf"), tl.float32)
    state = key + (first + 1).to(tl.uint64) * GAMMA
    for start in range(0, split_size, BLOCK):
        column = first + start
        score = tl.load(logits + column, mask=column < vocab, other=float("-inf"))
        maximum = tl.maximum(maximum, score * scored_scale)
        estimate = score * scale
        if not is_greedy:
            estimate += _rough_noise(_bits(state))
        state += BLOCK * GAMMA % (1 << 64)
        better = estimate > top
        second = tl.maximum(second, tl.where(better, top, estimate))
        top_id = tl.where(better, column, top_id)
        top = tl.where(better, estimate, top)
    highest = tl.max(top, axis=0)
    near = highest - MARGIN - 1e-5 * tl.abs(highest)
    if (tl.max(second, axis=0) >= near) & (highest > float("-inf")):
        top, top_id = _exact_lanes(logits, key, scale, is_greedy, vocab, split * split_size, split_size, near, BLOCK)
        highest, chosen = _best(top, top_id, vocab)
    elif tl.sum((top >= near).to(tl.int32), axis=0) > 1:
        exact = _exact(logits, key, scale, is_greedy, top_id, top >= near)
        highest, chosen = _best(exact, top_id, vocab)
    else:
        chosen = tl.min(tl.where(top == highest, top_id, vocab - 1), axis=0)
        highest = _exact(logits, key, scale, is_greedy, chosen, chosen < vocab)
    at = row * tl.num_programs(1) + split
    tl.store(best + at, highest)
    tl.store(maxima + at, tl.max(maximum, axis=0))
    tl.store(token + at, chosen)


@triton.jit
def _exact(logits, key, scale, is_greedy, column, mask) -> tl.tensor:
    exact = tl.load(logits + column, mask=mask, other=float("-inf")) * scale
    if not is_greedy:
        exact += _noise(_bits(key + (column + 1).to(tl.uint64) * GAMMA))
    return exact


@triton.jit
def _best(top, top_id, vocab) -> tuple[tl.tensor, tl.tensor]:
    highest = tl.max(top, axis=0)
    return highest, tl.min(tl.where(top == highest, top_id, vocab - 1), axis=0)


@triton.jit
def _exact_lanes(
    logits, key, scale, is_greedy, vocab, begin, size, near, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Each lane's best entry and its id, of blocks with any near the top."""
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    top_id = tl.full((BLOCK,), 0, tl.int32) + vocab - 1
    for start in range(0, size, BLOCK):
        column = begin + start + tl.arange(0, BLOCK)
        estimate = tl.load(logits + column, mask=column < vocab, other=float("-inf")) * scale
        if not is_greedy:
            estimate += _rough_noise(_bits(key + (column + 1).to(tl.uint64) * GAMMA))
        if tl.max(estimate, axis=0) >= near:
            exact = _exact(logits, key, scale, is_greedy, column, column < vocab)
            better = exact > top
            top_id = tl.where(better, column, top_id)
            top = tl.where(better, exact, top)
    return top, top_id


@triton.jit
def _mix(x) -> tl.tensor:
    """64 random bits of a state; the states of a key are key + (count + 1) * GAMMA, as in `sampling.position_keys`."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _bits(state) -> tl.tensor:
    """32 random bits of a state, as in `sampling.gumbel_noise`."""
    return (_mix(state) >> 32).to(tl.uint32)


@triton.jit
def _noise(bits) -> tl.tensor:
    v = (bits.to(tl.float64) + 0.5) * 2.0**-32
    return (-tl.log(-libdevice.log1p(-v))).to(tl.float32)


@triton.jit
def _rough_noise(bits) -> tl.tensor:
    v = (bits.to(tl.float32) + 0.5) * 2.0**-32
    rest = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.0**-32
    return -_rough_log(tl.where(v < 0.01, v * (1.0 + v * (0.5 + v * 0.33333334)), -_rough_log(rest)))


@triton.jit
def _rough_log(x) -> tl.tensor:
    """The processor's own logarithm: its error stays below 1e-6, and below 1e-6 of the exponent for the tiny."""
    log2 = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return log2 * 0.6931472
