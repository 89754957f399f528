"""Top-k, top-p and min-p on NVIDIA GPUs without sorting, by a threshold for each row.

A filter keeps the head of a row's order (`filters.distances`). Top-k weighs an entry as 1, and
top-p by its share in whole 2^-40ths of the likeliest one's, so no sum depends on its order. The
threshold is the least distance such that all entries within it weigh enough. `threshold_triton`
searches for it among the bits of distances, which are at least 1. A turn weighs what lies in the
first one, two and three quarters of the range that is left, and keeps one quarter. Blocks with no
entry in the range are skipped, without a read where even their nearest entry lies beyond. Of the
entries at the threshold, as many are kept, by id, as the weight allows.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.runtime.padding import dense
from spmd_rl.kernels.runtime.pdl import overlapping, wait
from spmd_rl.kernels.vocab import kept_words
from spmd_rl.kernels.vocab.threshold_triton import (
    MOST_SPLITS,
    QUARTERS,
    block_scores,
    is_within,
    place_of,
    settle,
    share_of,
    term_of,
    weigh,
)

BLOCK, NUM_WARPS = 256, 1
WORD_BITS = tl.constexpr(kept_words.WORD_BITS)
NUM_PROGRAMS = 8192
COUNT_TURNS = 15  # 30 bits: from 1 to the greatest distance that is finite
SHARE_TURNS = 13  # 26 bits: to 256, far beyond the last entry with a share


class Head(NamedTuple):
    """The head of each row: entries within `threshold`, and those at it up to the id `last`.

    Shape: both [M]; `threshold` int32 as of `place_of`, with BEYOND for a whole row; `last` int64.
    """

    threshold: Tensor
    last: Tensor


class _Logits(NamedTuple):
    """Logits with the maxima of their blocks, and how programs share the vocabulary.

    Shape: logits [M, V] fp32, inv_temperature and top [M] fp32, maxima [M, blocks] fp32.
    """

    logits: Tensor
    inv_temperature: Tensor
    maxima: Tensor
    top: Tensor
    splits: int
    each: int

    def launch(self, kernel: Any, splits: int, *given: Any, **constants: Any) -> None:
        logits, inv_temperature, maxima, top, _, each = self
        kernel[(len(logits), splits)](
            logits, inv_temperature, maxima, top, *given, logits.shape[1], each,
            BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=False, **constants, **overlapping(),
        )  # fmt: skip


def filtered(
    logits: Tensor,
    inv_temperature: Tensor,
    greedy: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    kept: kept_words.KeptRows | None = None,
) -> Tensor:
    """Return logits * inv_temperature, minus infinity where filters reject; greedy rows unchanged.

    What each row keeps is also written to `kept`.
    Shape: logits [M, V] fp32, all else [M]; returns [M, V] fp32.
    """
    logits = dense(logits)
    num_rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    each = triton.cdiv(blocks, min(triton.cdiv(NUM_PROGRAMS, num_rows), MOST_SPLITS.value))
    maxima = logits.new_empty(num_rows, blocks)
    rows = _Logits(logits, inv_temperature, maxima, maxima, triton.cdiv(blocks, each), each)
    rows.launch(_maxima, rows.splits)
    rows = rows._replace(top=maxima.amax(1))
    by_count = None if top_k is None else _head(rows, top_k, counted=True)
    by_share = None
    if top_p is not None:
        shares = torch.empty(num_rows, rows.splits, dtype=torch.int64, device=logits.device)
        rows.launch(_shares, rows.splits, *(by_count or (None, None)), shares)
        enough = (top_p.double() * shares.sum(1).double()).ceil().long().clamp(min=1)
        by_share = _head(rows, torch.where(top_p < 1, enough, 0), counted=False)
    out = torch.empty_like(logits)
    heads = (*(by_count or (None, None)), *(by_share or (None, None)))
    rows.launch(_keep, rows.splits, greedy, *heads, min_p, out, *(kept or (None, None)))
    return out


def _head(rows: _Logits, enough: Tensor, counted: bool) -> Head:
    """Return the least head of each row that weighs `enough` [M] int64.

    It is the whole row where `enough` is 0 or too much.
    """
    num_rows, device = len(enough), enough.device
    turns = COUNT_TURNS if counted else SHARE_TURNS
    states = torch.empty(turns, 3, num_rows, dtype=torch.int64, device=device)
    weights = torch.empty(
        turns, QUARTERS.value, num_rows, rows.splits, dtype=torch.int64, device=device
    )
    constants = {"COUNTED": counted, "TURNS": turns}
    for turn in range(turns):
        rows.launch(weigh, rows.splits, enough, states, weights, turn, **constants)
    head = Head(
        *(torch.empty(num_rows, dtype=dtype, device=device) for dtype in (torch.int32, torch.int64))
    )
    rows.launch(settle, 1, enough, states, weights, rows.splits, *head, **constants)
    return head


@triton.jit(do_not_specialize=["each"])
def _maxima(logits, inv_temperature, maxima, top, vocab, each, BLOCK: tl.constexpr) -> None:
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    blocks = tl.cdiv(vocab, BLOCK)
    wait()
    for block in range(split * each, min((split + 1) * each, blocks)):
        score, _ = block_scores(logits, inv_temperature, row, block, vocab, BLOCK)
        tl.store(maxima + row * blocks + block, tl.max(score, axis=0))


@triton.jit(do_not_specialize=["each"])
def _shares(
    logits, inv_temperature, maxima, top, threshold, last, shares, vocab, each, BLOCK: tl.constexpr
) -> None:
    """Store what the entries of a head weigh, or all entries without a head."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait()
    highest = tl.load(top + row)
    total = tl.zeros((BLOCK,), tl.int64)
    for block in range(split * each, min((split + 1) * each, tl.cdiv(vocab, BLOCK))):
        score, column = block_scores(logits, inv_temperature, row, block, vocab, BLOCK)
        place = place_of(score, highest)
        total += tl.where(is_within(place, column, threshold, last, row), share_of(place), 0)
    tl.store(shares + row * tl.num_programs(1) + split, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["each"])
def _keep(
    logits, inv_temperature, maxima, top, greedy, count_threshold, count_last,
    share_threshold, share_last, min_p, out, replays, words, vocab, each, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait()
    highest, is_greedy = tl.load(top + row), False
    if greedy is not None:
        is_greedy = tl.load(greedy + row)
    for block in range(split * each, min((split + 1) * each, tl.cdiv(vocab, BLOCK))):
        score, column = block_scores(logits, inv_temperature, row, block, vocab, BLOCK)
        place = place_of(score, highest)
        kept = is_within(place, column, count_threshold, count_last, row)
        kept &= is_within(place, column, share_threshold, share_last, row)
        if min_p is not None:
            kept &= term_of(place) >= tl.load(min_p + row)
        result = tl.where(kept, score, float("-inf"))
        if is_greedy:
            result = tl.load(logits + row * vocab + column, mask=column < vocab)
        tl.store(out + row * vocab + column, result, mask=column < vocab)
        if words is not None:
            is_bit = (kept & (column < vocab)) | (tl.load(replays + row) == 0)
            _store_bits(words, is_bit, row, block, tl.cdiv(vocab, WORD_BITS), BLOCK)


@triton.jit
def _store_bits(words, is_bit, row, block, num_words, BLOCK: tl.constexpr) -> None:
    """Store a block of a row's set, one bit an entry."""
    bits = tl.reshape(is_bit, (BLOCK // WORD_BITS, WORD_BITS)).to(tl.int32)
    word = tl.sum(bits << tl.arange(0, WORD_BITS)[None, :], axis=1)
    column = block * (BLOCK // WORD_BITS) + tl.arange(0, BLOCK // WORD_BITS)
    tl.store(words + row * num_words + column, word, mask=column < num_words)
