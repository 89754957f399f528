"""Top-k, top-p and min-p on NVIDIA GPUs without sorting: a threshold a row, found by weighing what
lies within it.

What a filter leaves is the head of a row's order (`sampling.distances`). Top-k weighs an entry as
1, top-p by its share in whole 2^-40ths of the likeliest one's, so no sum depends on its order. The
threshold is the least distance such that all within it weigh enough. It is searched for among the
bits of distances, which are at least 1: a turn weighs what lies in the first, the first two and the
first three quarters of the range that is left, and leaves one quarter. Blocks with no entry in the
range are passed over, unread where even their nearest lies beyond. Of the entries at the threshold
as many stay, by id, as the weight takes.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from spmd_rl.kernels.runtime.padding import dense
from spmd_rl.kernels.runtime.pdl import overlapping, wait
from spmd_rl.kernels.vocab.sampling import NUCLEUS_UNITS

BLOCK, NUM_WARPS = 256, 1
NUM_PROGRAMS = 8192
MOST_SPLITS = tl.constexpr(128)  # of a row
COUNT_TURNS = 15  # 30 bits: from 1 to the greatest distance that is finite
SHARE_TURNS = 13  # 26 bits: to 256, far beyond the last entry with a share
QUARTERS = tl.constexpr(3)  # weighed a turn
UNITS = tl.constexpr(NUCLEUS_UNITS)
ONE_BITS = tl.constexpr(0x3F800000)
BEYOND = tl.constexpr((1 << 31) - 1)


class Head(NamedTuple):
    """The entries of each row within `threshold`, and of those at it the ones up to id `last`.

    Shape: both [M]; `threshold` int32 as of `_place`, BEYOND all of them for a whole row, `last`
    int64.
    """

    threshold: Tensor
    last: Tensor


class _Rows(NamedTuple):
    """Rows of logits with the maxima of their blocks, and how the vocabulary is split among
    programs.

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
) -> Tensor:
    """logits * inv_temperature with the entries that the filters reject at minus infinity; greedy
    rows as they are.

    Shape: logits [M, V] fp32, all else [M]; returns [M, V] fp32.
    """
    logits = dense(logits)
    num_rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    each = triton.cdiv(blocks, min(triton.cdiv(NUM_PROGRAMS, num_rows), MOST_SPLITS.value))
    maxima = logits.new_empty(num_rows, blocks)
    rows = _Rows(logits, inv_temperature, maxima, maxima, triton.cdiv(blocks, each), each)
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
    rows.launch(_keep, rows.splits, greedy, *heads, min_p, out)
    return out


def _head(rows: _Rows, enough: Tensor, counted: bool) -> Head:
    """The least head of each row's order that weighs `enough` [M] int64; all of a row where that is
    0 or too much.
    """
    num_rows, device = len(enough), enough.device
    turns = COUNT_TURNS if counted else SHARE_TURNS
    states = torch.empty(turns, 3, num_rows, dtype=torch.int64, device=device)
    weights = torch.empty(
        turns, QUARTERS.value, num_rows, rows.splits, dtype=torch.int64, device=device
    )
    constants = {"COUNTED": counted, "TURNS": turns}
    for turn in range(turns):
        rows.launch(_weigh, rows.splits, enough, states, weights, turn, **constants)
    head = Head(
        *(torch.empty(num_rows, dtype=dtype, device=device) for dtype in (torch.int32, torch.int64))
    )
    rows.launch(_settle, 1, enough, states, weights, rows.splits, *head, **constants)
    return head


@triton.jit(do_not_specialize=["each"])
def _maxima(logits, inv_temperature, maxima, top, vocab, each, BLOCK: tl.constexpr) -> None:
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    blocks = tl.cdiv(vocab, BLOCK)
    wait()
    for block in range(split * each, min((split + 1) * each, blocks)):
        score, _ = _scores(logits, inv_temperature, row, block, vocab, BLOCK)
        tl.store(maxima + row * blocks + block, tl.max(score, axis=0))


@triton.jit(do_not_specialize=["each"])
def _shares(
    logits, inv_temperature, maxima, top, threshold, last, shares, vocab, each, BLOCK: tl.constexpr
) -> None:
    """What the entries of a head weigh, or all."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait()
    highest = tl.load(top + row)
    total = tl.zeros((BLOCK,), tl.int64)
    for block in range(split * each, min((split + 1) * each, tl.cdiv(vocab, BLOCK))):
        score, column = _scores(logits, inv_temperature, row, block, vocab, BLOCK)
        place = _place(score, highest)
        total += tl.where(_within(place, column, threshold, last, row), _share(place), 0)
    tl.store(shares + row * tl.num_programs(1) + split, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["each", "turn"])
def _weigh(
    logits, inv_temperature, maxima, top, enough, states, weights, turn, vocab, each,
    BLOCK: tl.constexpr, COUNTED: tl.constexpr, TURNS: tl.constexpr,
) -> None:  # fmt: skip
    """What lies in the first quarters of the range, of one split."""
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    num_rows, blocks = tl.num_programs(0), tl.cdiv(vocab, BLOCK)
    wait()
    start, nearer, within = _narrowed(enough, states, weights, row, num_rows, splits, turn, TURNS)
    if split == 0:
        state = states + turn * 3 * num_rows + row
        tl.store(state, start)
        tl.store(state + num_rows, nearer)
        tl.store(state + 2 * num_rows, within)
    begin, quarter = start.to(tl.int32), _quarter(turn, TURNS)
    first, second, third = begin + quarter, begin + 2 * quarter, begin + 3 * quarter
    highest = tl.load(top + row)
    in_one = tl.zeros((BLOCK,), tl.int64)
    in_two = tl.zeros((BLOCK,), tl.int64)
    in_three = tl.zeros((BLOCK,), tl.int64)
    if tl.load(enough + row) > 0:
        for block in range(split * each, min((split + 1) * each, blocks)):
            if _place(tl.load(maxima + row * blocks + block), highest) < third:
                score, column = _scores(logits, inv_temperature, row, block, vocab, BLOCK)
                place = _place(score, highest)
                place = tl.where((place >= begin) & (column < vocab), place, BEYOND)
                if tl.min(place, axis=0) < third:
                    weight = tl.full((BLOCK,), 1, tl.int64) if COUNTED else _share(place)
                    in_one += tl.where(place < first, weight, 0)
                    in_two += tl.where(place < second, weight, 0)
                    in_three += tl.where(place < third, weight, 0)
    out = weights + (turn * QUARTERS * num_rows + row) * splits + split
    tl.store(out, tl.sum(in_one, axis=0))
    tl.store(out + num_rows * splits, tl.sum(in_two, axis=0))
    tl.store(out + 2 * num_rows * splits, tl.sum(in_three, axis=0))


@triton.jit(do_not_specialize=["each", "splits"])
def _settle(
    logits, inv_temperature, maxima, top, enough, states, weights, splits, threshold, last, vocab, each,
    BLOCK: tl.constexpr, COUNTED: tl.constexpr, TURNS: tl.constexpr,
) -> None:  # fmt: skip
    """The threshold, and the id of the last entry at it that stays."""
    row, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(vocab, BLOCK)
    wait()
    start, nearer, within = _narrowed(
        enough, states, weights, row, tl.num_programs(0), splits, TURNS, TURNS
    )
    at, highest = start.to(tl.int32), tl.load(top + row)
    needed = tl.load(enough + row)
    share = tl.full((), 1, tl.int64)
    if not COUNTED:
        share = tl.maximum(_share(at), 1)
    staying = tl.cdiv(needed - nearer, share)
    until = tl.full((), 0, tl.int64) + vocab
    if staying < (within - nearer) // share:
        seen = tl.full((), 0, tl.int64)
        for block in range(blocks):
            if (seen < staying) & (_place(tl.load(maxima + row * blocks + block), highest) <= at):
                score, column = _scores(logits, inv_temperature, row, block, vocab, BLOCK)
                equal = ((_place(score, highest) == at) & (column < vocab)).to(tl.int32)
                count = seen + tl.cumsum(equal, axis=0)
                until = tl.minimum(
                    until, tl.min(tl.where((equal > 0) & (count == staying), column, vocab), axis=0)
                )
                seen += tl.sum(equal, axis=0)
    everything = (needed <= 0) | (at == (1 << 2 * TURNS) - 1)
    tl.store(threshold + row, tl.where(everything, BEYOND, at))
    tl.store(last + row, until)


@triton.jit(do_not_specialize=["each"])
def _keep(
    logits, inv_temperature, maxima, top, greedy, count_threshold, count_last, share_threshold, share_last, min_p,
    out, vocab, each, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait()
    highest, is_greedy = tl.load(top + row), False
    if greedy is not None:
        is_greedy = tl.load(greedy + row)
    for block in range(split * each, min((split + 1) * each, tl.cdiv(vocab, BLOCK))):
        score, column = _scores(logits, inv_temperature, row, block, vocab, BLOCK)
        place = _place(score, highest)
        kept = _within(place, column, count_threshold, count_last, row)
        kept &= _within(place, column, share_threshold, share_last, row)
        if min_p is not None:
            kept &= _term(place) >= tl.load(min_p + row)
        result = tl.where(kept, score, float("-inf"))
        if is_greedy:
            result = tl.load(logits + row * vocab + column, mask=column < vocab)
        tl.store(out + row * vocab + column, result, mask=column < vocab)


@triton.jit
def _narrowed(
    enough, states, weights, row, num_rows, splits, turn, TURNS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Where the range begins after so many turns, what is nearer than it, and what is nearer or
    within it.
    """
    start, nearer, within = (
        tl.full((), 0, tl.int64),
        tl.full((), 0, tl.int64),
        tl.full((), 0, tl.int64),
    )
    if turn > 0:
        before = turn - 1
        state = states + before * 3 * num_rows + row
        start, nearer, within = (
            tl.load(state),
            tl.load(state + num_rows),
            tl.load(state + 2 * num_rows),
        )
        split = tl.arange(0, MOST_SPLITS)
        at = weights + (before * QUARTERS * num_rows + row) * splits + split
        one = nearer + tl.sum(tl.load(at, mask=split < splits, other=0), axis=0)
        two = nearer + tl.sum(tl.load(at + num_rows * splits, mask=split < splits, other=0), axis=0)
        three = nearer + tl.sum(
            tl.load(at + 2 * num_rows * splits, mask=split < splits, other=0), axis=0
        )
        needed = tl.load(enough + row)
        passed = (one < needed).to(tl.int64) + (two < needed) + (three < needed)
        within = tl.where(
            passed == 0, one, tl.where(passed == 1, two, tl.where(passed == 2, three, within))
        )
        nearer = tl.where(
            passed == 3, three, tl.where(passed == 2, two, tl.where(passed == 1, one, nearer))
        )
        start += passed * _quarter(before, TURNS)
    return start, nearer, within


@triton.jit
def _quarter(turn, TURNS: tl.constexpr) -> tl.tensor:
    return tl.full((), 1, tl.int32) << (2 * (TURNS - 1 - turn))


@triton.jit
def _scores(
    logits, inv_temperature, row, block, vocab, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """A block's scores at the row's temperature, and their ids."""
    column = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * vocab + column, mask=column < vocab, other=float("-inf"))
    return score * tl.load(inv_temperature + row), column


@triton.jit
def _place(score, highest) -> tl.tensor:
    """As `sampling.distances`, in its bits as a whole number from 0 on."""
    return (highest - score + 1.0).to(tl.int32, bitcast=True) - ONE_BITS


@triton.jit
def _term(place) -> tl.tensor:
    return libdevice.exp(1.0 - (place + ONE_BITS).to(tl.float32, bitcast=True))


@triton.jit
def _share(place) -> tl.tensor:
    """As in `sampling._rejected`."""
    return (_term(place) * UNITS).to(tl.int64)


@triton.jit
def _within(place, column, threshold, last, row) -> tl.tensor:
    """Whether entries are of the row's head, if there is one."""
    kept = column >= 0
    if threshold is not None:
        at = tl.load(threshold + row)
        kept = (place < at) | ((place == at) & (column <= tl.load(last + row)))
    return kept
