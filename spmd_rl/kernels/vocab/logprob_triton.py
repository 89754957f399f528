"""Log-probabilities on NVIDIA GPUs, in three small kernels.

They find the maximum of each (row, vocabulary shard); its sum of exp(z - m), lane by lane over
chunks of 1,024 and then along one tree; and the sum of a row's eight shards in ascending order.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.runtime.pdl import overlapping, wait

SUM_WARPS = 4
UNROLLED = tl.constexpr(2)


def logprob_forward(
    logits: Tensor,
    targets: Tensor,
    inv_temperature: Tensor,
    num_shards: int,
    chunk: int,
    words: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probability [M], entropy [M], and each row's maximum and sum [2, M].

    With `words` [M, W] int32 (`kept_words.py`), all are those of each row's set.
    """
    num_rows, vocab = logits.shape
    shape = shard_shape(vocab, num_shards, chunk)
    maxima = logits.new_empty(num_rows, num_shards)
    _shard_maxima[(num_rows, num_shards)](logits, inv_temperature, words, maxima, vocab, **shape)
    sums = logits.new_empty(2, num_rows, num_shards)
    _shard_sums[(num_rows, num_shards)](
        logits, inv_temperature, words, maxima, sums[0], sums[1], vocab, num_shards,
        BLOCK=triton.next_power_of_2(num_shards), **shape,
    )  # fmt: skip
    return combined(logits, targets, inv_temperature, maxima, sums)


def shard_shape(vocab: int, num_shards: int, chunk: int) -> dict[str, int | bool]:
    """Return the launch options of a kernel that calls `sum_shard`.

    The order of its additions depends on nothing else.
    """
    shard = triton.cdiv(vocab, num_shards)
    return {
        "SHARD": shard,
        "CHUNK": chunk,
        "num_warps": SUM_WARPS,
        "enable_fp_fusion": False,
    } | overlapping()


def combined(
    logits: Tensor, targets: Tensor, inv_temperature: Tensor, maxima: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `logprob_forward` returns, from the sums of each shard.

    Shape: `maxima` [M, any] cover each row's logits * inv_temperature; sums [2, M, shards].
    """
    num_rows, vocab = logits.shape
    logprob, entropy, norms = (
        logits.new_empty(num_rows),
        logits.new_empty(num_rows),
        logits.new_empty(2, num_rows),
    )
    splits = maxima.shape[1]
    _combine[(num_rows,)](
        logits, targets, inv_temperature, maxima, sums[0], sums[1], logprob, entropy,
        norms[0], norms[1], vocab, splits, NUM_SHARDS=sums.shape[2],
        BLOCK=triton.next_power_of_2(splits), num_warps=1,
        enable_fp_fusion=False, **overlapping(),
    )  # fmt: skip
    return logprob, entropy, norms


def candidates_forward(
    logits: Tensor, candidates: Tensor, inv_temperature: Tensor, norms: Tensor
) -> Tensor:
    """Return the log-probabilities of candidates [M, K], with the bits of `logprob_forward`.

    Shape: candidates [M, K] int64; norms [2, M] as of `logprob_forward`.
    """
    num_rows, count = candidates.shape
    logprobs = logits.new_empty(num_rows, count)
    _candidates[(num_rows,)](
        logits, candidates.contiguous(), inv_temperature, norms[0], norms[1], logprobs,
        logits.shape[1], count, BLOCK=triton.next_power_of_2(count), num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    return logprobs


@triton.jit
def _shard_maxima(
    logits, inv_temperature, words, maxima, vocab, SHARD: tl.constexpr, CHUNK: tl.constexpr
) -> None:
    row, shard = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait()
    scale = tl.load(inv_temperature + row)
    best = tl.full((CHUNK,), float("-inf"), tl.float32)
    for start in range(0, SHARD, CHUNK):
        within = start + tl.arange(0, CHUNK)
        column = shard * SHARD + within
        inside = (within < SHARD) & (column < vocab)
        if words is not None:
            inside &= is_kept(words, row, column, vocab)
        best = tl.maximum(
            best, tl.load(logits + row * vocab + column, mask=inside, other=float("-inf")) * scale
        )
    tl.store(maxima + row * tl.num_programs(1) + shard, tl.max(best, axis=0))


@triton.jit
def is_kept(words, row, column, vocab) -> tl.tensor:
    """Return whether the entries `column` belong to the row's set."""
    word = tl.load(words + row * tl.cdiv(vocab, 32) + column // 32, mask=column < vocab, other=0)
    return ((word >> (column % 32)) & 1) != 0


@triton.jit
def row_maximum(maxima, row, splits, BLOCK: tl.constexpr) -> tl.tensor:
    split = tl.arange(0, BLOCK)
    return tl.max(
        tl.load(maxima + row * splits + split, mask=split < splits, other=float("-inf")), axis=0
    )


@triton.jit(do_not_specialize=["splits"])
def _shard_sums(
    logits, inv_temperature, words, maxima, sums, weighted, vocab, splits,
    BLOCK: tl.constexpr, SHARD: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    row, shard = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait()
    maximum = row_maximum(maxima, row, splits, BLOCK)
    scale = tl.load(inv_temperature + row)
    total, first_moment = sum_shard(
        logits + row * vocab, scale, maximum, words, row, shard, vocab, SHARD, CHUNK
    )
    at = row * tl.num_programs(1) + shard
    tl.store(sums + at, total)
    tl.store(weighted + at, first_moment)


@triton.jit
def sum_shard(
    scores, scale, maximum, words, row, shard, vocab, SHARD: tl.constexpr, CHUNK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return a shard's sums of exp(z - m) and exp(z - m) * (z - m).

    `scores` are the row's logits, which `scale` multiplies, and m is the maximum of all. What the
    compiler knows of their alignment decides the order of additions.
    """
    total, first_moment = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
    for start in tl.range(0, SHARD, CHUNK, loop_unroll_factor=UNROLLED):
        within = start + tl.arange(0, CHUNK)
        column = shard * SHARD + within
        inside = (within < SHARD) & (column < vocab)
        if words is not None:
            inside &= is_kept(words, row, column, vocab)
        score = tl.load(scores + column, mask=inside, other=0.0, eviction_policy="evict_first")
        shifted = score * scale - maximum
        term = tl.where(inside, tl.exp(shifted), 0.0)
        total += term
        first_moment += tl.where(inside, term * shifted, 0.0)
    return tl.sum(total, axis=0), tl.sum(first_moment, axis=0)


@triton.jit(do_not_specialize=["splits"])
def _combine(
    logits, targets, inv_temperature, maxima, sums, weighted, logprob, entropy, row_max,
    row_sum, vocab, splits, NUM_SHARDS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    wait()
    maximum = row_maximum(maxima, row, splits, BLOCK)
    total = tl.load(sums + row * NUM_SHARDS)
    first_moment = tl.load(weighted + row * NUM_SHARDS)
    for shard in tl.static_range(1, NUM_SHARDS):
        total += tl.load(sums + row * NUM_SHARDS + shard)
        first_moment += tl.load(weighted + row * NUM_SHARDS + shard)
    chosen = tl.load(logits + row * vocab + tl.load(targets + row)) * tl.load(inv_temperature + row)
    log_total = tl.log(total)
    tl.store(logprob + row, (chosen - maximum) - log_total)
    tl.store(entropy + row, log_total - first_moment / total)
    tl.store(row_max + row, maximum)
    tl.store(row_sum + row, total)


@triton.jit
def _candidates(
    logits, candidates, inv_temperature, row_max, row_sum, logprobs, vocab, count,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = place < count
    column = tl.load(candidates + row * count + place, mask=inside, other=0)
    chosen = tl.load(logits + row * vocab + column) * tl.load(inv_temperature + row)
    logprob = (chosen - tl.load(row_max + row)) - tl.log(tl.load(row_sum + row))
    tl.store(logprobs + row * count + place, logprob, mask=inside)
