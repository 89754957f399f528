"""Search for the thresholds of top-k and top-p on NVIDIA GPUs, among the bits of distances.

Each turn weighs what lies in the first one, two and three quarters of the range that is left
(`weigh`), and keeps one quarter of it. `settle` reads the threshold from the last turn.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from spmd_rl.kernels.runtime.pdl import wait
from spmd_rl.kernels.vocab.filters import NUCLEUS_UNITS

MOST_SPLITS = tl.constexpr(128)  # of a row
QUARTERS = tl.constexpr(3)  # quarters that one turn weighs
UNITS = tl.constexpr(NUCLEUS_UNITS)
ONE_BITS = tl.constexpr(0x3F800000)  # of 1.0, the least distance
BEYOND = tl.constexpr((1 << 31) - 1)  # a place behind all entries


@triton.jit(do_not_specialize=["each", "turn"])
def weigh(
    logits, inv_temperature, maxima, top, enough, states, weights, turn, vocab, each,
    BLOCK: tl.constexpr, COUNTED: tl.constexpr, TURNS: tl.constexpr,
) -> None:  # fmt: skip
    """Store what lies in the first quarters of the range, for one split of the vocabulary."""
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
            if place_of(tl.load(maxima + row * blocks + block), highest) < third:
                score, column = block_scores(logits, inv_temperature, row, block, vocab, BLOCK)
                place = place_of(score, highest)
                place = tl.where((place >= begin) & (column < vocab), place, BEYOND)
                if tl.min(place, axis=0) < third:
                    weight = tl.full((BLOCK,), 1, tl.int64) if COUNTED else share_of(place)
                    in_one += tl.where(place < first, weight, 0)
                    in_two += tl.where(place < second, weight, 0)
                    in_three += tl.where(place < third, weight, 0)
    out = weights + (turn * QUARTERS * num_rows + row) * splits + split
    tl.store(out, tl.sum(in_one, axis=0))
    tl.store(out + num_rows * splits, tl.sum(in_two, axis=0))
    tl.store(out + 2 * num_rows * splits, tl.sum(in_three, axis=0))


@triton.jit(do_not_specialize=["each", "splits"])
def settle(
    logits, inv_temperature, maxima, top, enough, states, weights, splits, threshold, last,
    vocab, each, BLOCK: tl.constexpr, COUNTED: tl.constexpr, TURNS: tl.constexpr,
) -> None:  # fmt: skip
    """Store the threshold, and the id of the last entry at it that is kept."""
    row, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(vocab, BLOCK)
    wait()
    start, nearer, within = _narrowed(
        enough, states, weights, row, tl.num_programs(0), splits, TURNS, TURNS
    )
    at, highest = start.to(tl.int32), tl.load(top + row)
    needed = tl.load(enough + row)
    share = tl.full((), 1, tl.int64)
    if not COUNTED:
        share = tl.maximum(share_of(at), 1)
    staying = tl.cdiv(needed - nearer, share)
    until = tl.full((), 0, tl.int64) + vocab
    if staying < (within - nearer) // share:
        seen = tl.full((), 0, tl.int64)
        for block in range(blocks):
            if (seen < staying) & (place_of(tl.load(maxima + row * blocks + block), highest) <= at):
                score, column = block_scores(logits, inv_temperature, row, block, vocab, BLOCK)
                equal = ((place_of(score, highest) == at) & (column < vocab)).to(tl.int32)
                count = seen + tl.cumsum(equal, axis=0)
                until = tl.minimum(
                    until, tl.min(tl.where((equal > 0) & (count == staying), column, vocab), axis=0)
                )
                seen += tl.sum(equal, axis=0)
    everything = (needed <= 0) | (at == (1 << 2 * TURNS) - 1)
    tl.store(threshold + row, tl.where(everything, BEYOND, at))
    tl.store(last + row, until)


@triton.jit
def _narrowed(
    enough, states, weights, row, num_rows, splits, turn, TURNS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the start of the range after `turn` turns, the weight nearer than it, and with it."""
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
def block_scores(
    logits, inv_temperature, row, block, vocab, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return a block's scores at the row's temperature, and their ids."""
    column = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * vocab + column, mask=column < vocab, other=float("-inf"))
    return score * tl.load(inv_temperature + row), column


@triton.jit
def place_of(score, highest) -> tl.tensor:
    """Return the bits of `filters.distances` as a whole number from 0 on."""
    return (highest - score + 1.0).to(tl.int32, bitcast=True) - ONE_BITS


@triton.jit
def term_of(place) -> tl.tensor:
    return libdevice.exp(1.0 - (place + ONE_BITS).to(tl.float32, bitcast=True))


@triton.jit
def share_of(place) -> tl.tensor:
    """Return an entry's share as in `filters._rejected`."""
    return (term_of(place) * UNITS).to(tl.int64)


@triton.jit
def is_within(place, column, threshold, last, row) -> tl.tensor:
    """Return whether entries belong to the row's head, if there is one."""
    kept = column >= 0
    if threshold is not None:
        at = tl.load(threshold + row)
        kept = (place < at) | ((place == at) & (column <= tl.load(last + row)))
    return kept
