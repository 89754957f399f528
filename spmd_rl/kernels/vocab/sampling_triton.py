"""Gumbel-max on NVIDIA GPUs, whose noise exists only in registers.

The noise -log(-log1p(-v)) is defined in float64, which is slow to compute for a whole vocabulary.
But -log1p(-v) >= v, so the noise is at most -log(v), and close to it where it is great. A first
pass computes this bound in float32, raised by far more than its error, and stores the highest bound
of each block of the vocabulary. Rounding is monotone, so no entry of a block exceeds that bound.

Then a program for each row computes exact noise for the block with the highest bound, and for
others as long as their bounds reach the best entry so far: hardly ever one. It runs beside the sums
of the log-prob, which need only the maxima that the first pass has found.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from spmd_rl.kernels.runtime.padding import dense
from spmd_rl.kernels.runtime.pdl import overlapping, wait
from spmd_rl.kernels.vocab.logprob import NUM_VOCAB_SHARDS, VOCAB_CHUNK
from spmd_rl.kernels.vocab.logprob_triton import combined, row_maximum, shard_shape, sum_shard

BLOCK = 256
BOUND_WARPS = 1
NUM_PROGRAMS = 8192
MARGIN = tl.constexpr(1e-3)
GAMMA = tl.constexpr(0x9E3779B97F4A7C15)


def gumbel_argmax(
    scores: Tensor, inv_temperature: Tensor, keys: Tensor, greedy: Tensor | None
) -> Tensor:
    """Return the argmax of scores * inv_temperature + noise(keys), or of scores in greedy rows.

    Ties go to the lowest id. Shape: scores [M, V] fp32, all else [M]; returns [M] int64.
    """
    scores = dense(scores)
    num_rows, vocab = scores.shape
    bounds, _ = bounds_and_maxima(scores, inv_temperature, keys, None, greedy)
    drawn = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    _draw[(num_rows,)](
        scores, inv_temperature, keys, None, greedy, bounds, drawn, vocab, BLOCK,
        triton.next_power_of_2(bounds.shape[1]), num_warps=4, enable_fp_fusion=False,
        **overlapping(),
    )  # fmt: skip
    return drawn


def gumbel_argmax_and_logprob(
    logits: Tensor,
    inv_temperature: Tensor,
    bases: Tensor,
    positions: Tensor,
    greedy: Tensor | None,
    given: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the drawn tokens, or those that are `given` instead, and their log-probability.

    Shape: logits [M, V] fp32, all else [M]; returns [M] int64 and [M] fp32.
    """
    logits = dense(logits)
    num_rows, vocab = logits.shape
    bounds, maxima = bounds_and_maxima(logits, inv_temperature, bases, positions, greedy)
    drawn = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    sums = logits.new_empty(2, num_rows, NUM_VOCAB_SHARDS)
    _draw_and_sum[(num_rows, NUM_VOCAB_SHARDS + 1)](
        logits, inv_temperature, bases, positions, greedy, bounds, drawn, maxima, sums[0], sums[1],
        vocab, maxima.shape[1], BLOCK, triton.next_power_of_2(bounds.shape[1]), NUM_VOCAB_SHARDS,
        **shard_shape(vocab, NUM_VOCAB_SHARDS, VOCAB_CHUNK),
    )  # fmt: skip
    tokens = drawn if given is None else given
    return tokens, combined(logits, tokens, inv_temperature, maxima, sums)[0]


def bounds_and_maxima(
    scores: Tensor,
    inv_temperature: Tensor,
    keys: Tensor,
    positions: Tensor | None,
    greedy: Tensor | None,
    first: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return upper bounds of each block's entries [M, blocks], and maxima [M, any].

    The maxima are those of scores * inv_temperature. Of a part of the vocabulary, `first` is the id
    of the first score.
    """
    num_rows, vocab = scores.shape
    blocks = triton.cdiv(vocab, BLOCK)
    blocks_each = triton.cdiv(blocks, triton.cdiv(NUM_PROGRAMS, num_rows))
    splits = triton.cdiv(blocks, blocks_each)
    bounds, maxima = scores.new_empty(num_rows, blocks), scores.new_empty(num_rows, splits)
    _bound[(num_rows, splits)](
        scores, inv_temperature, keys, positions, greedy, first, bounds, maxima, vocab, blocks_each,
        BLOCK, num_warps=BOUND_WARPS, enable_fp_fusion=False, **overlapping(),
    )  # fmt: skip
    return bounds, maxima


@triton.jit(do_not_specialize=["first", "blocks_each"])
def _bound(
    scores, inv_temperature, keys, positions, greedy, first, bounds, maxima, vocab, blocks_each,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait()
    key, scale, is_greedy = _settings(inv_temperature, keys, positions, greedy, first, row)
    blocks, lane = tl.cdiv(vocab, BLOCK), tl.arange(0, BLOCK)
    steps = (lane + 1).to(tl.uint64) * GAMMA
    maximum = tl.full((BLOCK,), float("-inf"), tl.float32)
    for after in range(min(blocks_each, blocks - split * blocks_each)):
        block = split * blocks_each + after
        column = block * BLOCK + lane
        score = tl.load(scores + row * vocab + column, mask=column < vocab, other=float("-inf"))
        bound = score * scale
        maximum = tl.maximum(maximum, bound)
        if is_greedy:
            bound = score
        else:
            bound += _noise_bound(key + block.to(tl.uint64) * (BLOCK * GAMMA % (1 << 64)) + steps)
        tl.store(bounds + row * blocks + block, tl.max(bound, axis=0))
    tl.store(maxima + row * tl.num_programs(1) + split, tl.max(maximum, axis=0))


@triton.jit
def _draw(
    scores, inv_temperature, keys, positions, greedy, bounds, drawn, vocab,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
) -> None:  # fmt: skip
    wait()
    _, token = best_of_row(
        scores, inv_temperature, keys, positions, greedy, None, bounds, vocab, BLOCK, BLOCKS
    )
    tl.store(drawn + tl.program_id(0), token.to(tl.int64))


@triton.jit(do_not_specialize=["splits"])
def _draw_and_sum(
    logits, inv_temperature, keys, positions, greedy, bounds, drawn, maxima, sums, weighted,
    vocab, splits, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, NUM_SHARDS: tl.constexpr,
    SHARD: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    row, shard = tl.program_id(0).to(tl.int64), NUM_SHARDS - tl.program_id(1)
    wait()
    if shard == NUM_SHARDS:
        _, token = best_of_row(
            logits, inv_temperature, keys, positions, greedy, None, bounds, vocab, BLOCK, BLOCKS
        )
        tl.store(drawn + row, token.to(tl.int64))
    else:
        maximum = row_maximum(maxima, row, splits, BLOCKS)
        scale = tl.load(inv_temperature + row)
        total, first_moment = sum_shard(
            logits + row * vocab, scale, maximum, None, row, shard, vocab, SHARD, CHUNK
        )
        tl.store(sums + row * NUM_SHARDS + shard, total)
        tl.store(weighted + row * NUM_SHARDS + shard, first_moment)


@triton.jit
def best_of_row(
    scores, inv_temperature, keys, positions, greedy, first, bounds, vocab,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Return the row's best entry and its column.

    Blocks are searched, the highest bound first, while one may hold a better or equal lower entry.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    key, scale, is_greedy = _settings(inv_temperature, keys, positions, greedy, first, row)
    blocks = tl.cdiv(vocab, BLOCK)
    bound = tl.load(bounds + row * blocks + block, mask=block < blocks, other=float("-inf"))
    highest, top, chosen = tl.max(bound, axis=0), tl.full((), float("-inf"), tl.float32), vocab - 1
    while highest > float("-inf"):
        at = tl.min(tl.where(bound == highest, block, BLOCKS), axis=0)
        column = at * BLOCK + tl.arange(0, BLOCK)
        entry = tl.load(scores + row * vocab + column, mask=column < vocab, other=float("-inf"))
        if not is_greedy:
            entry = entry * scale + _noise(key + (column + 1).to(tl.uint64) * GAMMA)
        best = tl.max(entry, axis=0)
        lowest = tl.min(tl.where(entry == best, column, vocab - 1), axis=0)
        chosen = tl.where(
            best > top, lowest, tl.where(best == top, tl.minimum(lowest, chosen), chosen)
        )
        top = tl.maximum(top, best)
        in_reach = (bound > top) | ((bound == top) & (block * BLOCK < chosen))
        bound = tl.where(in_reach & (block != at), bound, float("-inf"))
        highest = tl.max(bound, axis=0)
    return top, chosen


@triton.jit
def _settings(
    inv_temperature, keys, positions, greedy, first, row
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return a row's key and scale, and whether it is greedy. Keys count from the id `first`."""
    key = tl.load(keys + row).to(tl.uint64)
    if positions is not None:
        key = _mix(key + (tl.load(positions + row) + 1).to(tl.uint64) * GAMMA)
    if first is not None:
        key += first.to(tl.uint64) * GAMMA
    is_greedy = False
    if greedy is not None:
        is_greedy = tl.load(greedy + row)
    return key, tl.load(inv_temperature + row), is_greedy


@triton.jit
def _mix(x) -> tl.tensor:
    """Return 64 random bits of a state.

    The states of a key are key + (count + 1) * GAMMA, as in `sampling.position_keys`.
    """
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _noise(state) -> tl.tensor:
    """Return the noise of `sampling.gumbel_noise`."""
    v = ((_mix(state) >> 32).to(tl.uint32).to(tl.float64) + 0.5) * 2.0**-32
    return (-tl.log(-libdevice.log1p(-v))).to(tl.float32)


@triton.jit
def _noise_bound(state) -> tl.tensor:
    """Return MARGIN - log(bits / 2^32), by the processor's logarithm, whose error is below 1e-5.

    It needs the upper half of `_mix`, without the last step: that step changes no bits below 2^31,
    and none by more than 1.
    """
    x = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    x ^= x >> 27
    low, high = x.to(tl.uint32), (x >> 32).to(tl.uint32)
    bits = tl.umulhi(low, tl.full((), 0x133111EB, tl.uint32)) + low * 0x94D049BB + high * 0x133111EB
    log2 = tl.inline_asm_elementwise(
        "{.reg .f32 x; cvt.rn.f32.u32 x, $1; lg2.approx.ftz.f32 $0, x;}",
        "=f,r", [bits], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    return tl.fma(log2, -0.6931471805599453, 32 * 0.6931471805599453 + MARGIN)
