"""The steps of `vocab_parallel_sample` on NVIDIA GPUs, with the order of `sampling_triton`'s sums.

What a rank does before an exchange, between two, and behind them is a launch or two each.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.runtime.padding import dense
from spmd_rl.kernels.runtime.pdl import overlapping, wait
from spmd_rl.kernels.vocab import sampling_triton, vocab_part
from spmd_rl.kernels.vocab.logprob import NUM_VOCAB_SHARDS, VOCAB_CHUNK
from spmd_rl.kernels.vocab.logprob_triton import row_maximum, shard_shape, sum_shard
from spmd_rl.kernels.vocab.sampling_triton import best_of_row, bounds_and_maxima
from spmd_rl.kernels.vocab.vocab_part import VocabPart

WORDS = tl.constexpr(vocab_part.ENTRY_WORDS)
MAXIMUM = tl.constexpr(vocab_part.MAXIMUM)
BEST = tl.constexpr(vocab_part.BEST)
CHOSEN = tl.constexpr(vocab_part.CHOSEN)
ID = tl.constexpr(vocab_part.ID)
ALIGNMENT = 16


def entries(
    logits: Tensor,
    inv_temperature: Tensor,
    bases: Tensor,
    positions: Tensor,
    greedy: Tensor | None,
    part: VocabPart,
) -> Tensor:
    """Return what this rank gives of each row in the first exchange. Shape: [M, 4] int32."""
    logits = dense(logits)
    num_rows, vocab = logits.shape
    asked = logits, inv_temperature, bases, positions, greedy
    bounds, maxima = bounds_and_maxima(*asked, part.first)
    out = torch.empty(num_rows, WORDS.value, dtype=torch.int32, device=logits.device)
    splits, blocks = maxima.shape[1], bounds.shape[1]
    _entries[(num_rows,)](
        *asked, part.first, bounds, maxima, out, vocab, splits, sampling_triton.BLOCK,
        triton.next_power_of_2(blocks), num_warps=4, enable_fp_fusion=False, **overlapping(),
    )  # fmt: skip
    return out


def sums(logits: Tensor, inv_temperature: Tensor, entries: Tensor, part: VocabPart) -> Tensor:
    """Return the sums of exp(z - m) of this rank's shards. Shape: entries [M, P, 4] int32."""
    num_rows, vocab = logits.shape
    if missing := _missing_columns(vocab, part.size):
        logits = F.pad(logits, (0, missing))
    logits = dense(logits)
    out = logits.new_empty(num_rows, part.num_shards)
    _sums[(num_rows, part.num_shards)](
        logits, inv_temperature, entries, out, vocab, logits.shape[1], part.count,
        **shard_shape(part.size, NUM_VOCAB_SHARDS, VOCAB_CHUNK),
    )  # fmt: skip
    return out


def _missing_columns(vocab: int, whole: int) -> int:
    """Return how many columns rows of `vocab` lack to be aligned as rows of `whole` are.

    The compiler has other code for rows of a multiple of 16, whose sums have another order. Few
    vocabularies lack any.
    """
    if whole % ALIGNMENT == 0:
        return -vocab % ALIGNMENT
    return int(vocab % ALIGNMENT == 0)


def drawn(entries: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens [M] int64 and log-probs [M], from what all ranks gave.

    Shape: entries [M, P, 4] int32, sums [M, shards].
    """
    num_rows, num_parts, _ = entries.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=sums.device)
    logprobs = sums.new_empty(num_rows)
    _drawn[(num_rows,)](
        entries, sums, tokens, logprobs, num_parts, sums.shape[1], num_warps=1,
        enable_fp_fusion=False, **overlapping(),
    )  # fmt: skip
    return tokens, logprobs


@triton.jit(do_not_specialize=["first", "splits"])
def _entries(
    logits, inv_temperature, bases, positions, greedy, first, bounds, maxima, out, vocab, splits,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    wait()
    # There are no more maxima than blocks.
    maximum = row_maximum(maxima, row, splits, BLOCKS)
    best, column = best_of_row(
        logits, inv_temperature, bases, positions, greedy, first, bounds, vocab, BLOCK, BLOCKS
    )
    chosen = tl.load(logits + row * vocab + column) * tl.load(inv_temperature + row)
    at = out + row * WORDS
    tl.store(at + MAXIMUM, maximum.to(tl.int32, bitcast=True))
    tl.store(at + BEST, best.to(tl.int32, bitcast=True))
    tl.store(at + CHOSEN, chosen.to(tl.int32, bitcast=True))
    tl.store(at + ID, (first + column).to(tl.int32))


@triton.jit
def _number(at) -> tl.tensor:
    return tl.load(at).to(tl.float32, bitcast=True)


@triton.jit
def _sums(
    logits, inv_temperature, entries, sums, vocab, stride, PARTS: tl.constexpr,
    SHARD: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    row, shard = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait()
    at = entries + row * PARTS * WORDS + MAXIMUM
    maximum = _number(at)
    for rank in tl.static_range(1, PARTS):
        maximum = tl.maximum(maximum, _number(at + rank * WORDS))
    scale = tl.load(inv_temperature + row)
    total, _ = sum_shard(
        logits + row * stride, scale, maximum, None, row, shard, vocab, SHARD, CHUNK
    )
    tl.store(sums + row * tl.num_programs(1) + shard, total)


@triton.jit
def _drawn(entries, sums, tokens, logprobs, PARTS: tl.constexpr, NUM_SHARDS: tl.constexpr) -> None:
    """The first rank with the best entry has the lowest id of those that are equal."""
    row = tl.program_id(0).to(tl.int64)
    wait()
    at = entries + row * PARTS * WORDS
    maximum, best = _number(at + MAXIMUM), _number(at + BEST)
    chosen, token = _number(at + CHOSEN), tl.load(at + ID)
    for rank in tl.static_range(1, PARTS):
        own = at + rank * WORDS
        maximum = tl.maximum(maximum, _number(own + MAXIMUM))
        is_better = _number(own + BEST) > best
        best = tl.where(is_better, _number(own + BEST), best)
        chosen = tl.where(is_better, _number(own + CHOSEN), chosen)
        token = tl.where(is_better, tl.load(own + ID), token)
    total = tl.load(sums + row * NUM_SHARDS)
    for shard in tl.static_range(1, NUM_SHARDS):
        total += tl.load(sums + row * NUM_SHARDS + shard)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, (chosen - maximum) - tl.log(total))
