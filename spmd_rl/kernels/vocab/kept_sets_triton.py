"""Kept sets on NVIDIA GPUs: their words are encoded for the host, and encodings become words again.

The encoding is that of `spmd_rl.types.kept_sets`. Nothing here waits for the device, and encoding
can be recorded in a graph: its results have a fixed place for each row.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.runtime.pdl import overlapping, wait
from spmd_rl.kernels.vocab import kept_words
from spmd_rl.kernels.vocab.kept_words import (
    CAPACITY,
    DATA_BYTES,
    EncodedRows,
    KeptRows,
    num_words,
)
from spmd_rl.types.kept_sets import BITMAP_SHARE

WORD_BLOCK, ID_BLOCK, BYTE_BLOCK = 1024, 128, 128
MORE = tl.constexpr(128)
AS_WORDS = tl.constexpr(kept_words.AS_WORDS)


def encode_rows(kept: KeptRows, out: EncodedRows, turn: Tensor | None = None) -> None:
    """Write the encoded sets of M <= N rows to step `turn` modulo T of `out`, else to step 0.

    Shape: turn [1] int64.
    """
    num_rows, width = kept.words.shape
    device = kept.words.device
    ids = torch.empty(num_rows, CAPACITY, dtype=torch.int32, device=device)
    counts = torch.empty(num_rows, dtype=torch.int32, device=device)
    _collect[(num_rows,)](
        kept.words, kept.replays, ids, counts, width, CAPACITY, WORD_BLOCK, num_warps=4,
        **overlapping(),
    )  # fmt: skip
    limit = min(CAPACITY, out.vocab // BITMAP_SHARE)
    _encode[(num_rows,)](
        ids, counts, kept.words, *out[:3], turn, *out.sizes.shape, width, out.vocab, limit,
        CAPACITY, DATA_BYTES, ID_BLOCK, num_warps=1, **overlapping(),
    )  # fmt: skip


def decoded(data: Tensor, starts: Tensor, stops: Tensor, vocab: int) -> Tensor:
    """Return the words of encoded sets; an empty set is the whole vocabulary.

    Shape: data [B] uint8; starts, stops [M] int64; returns [M, W] int32.
    """
    width = num_words(vocab)
    is_empty = (stops - starts == 1).to(torch.int32)
    words = (-is_empty).unsqueeze(1).repeat(1, width)
    if len(starts):
        _decode[(len(starts),)](
            data, starts, stops, words, vocab, width, BYTE_BLOCK, num_warps=4, **overlapping()
        )
    return words


@triton.jit
def _collect(
    words, replays, ids, counts, width, CAPACITY: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Store the ids of a row's set in ascending order while there is room, and their number."""
    row = tl.program_id(0).to(tl.int64)
    wait()
    count = tl.full((), 0, tl.int32)
    if tl.load(replays + row):
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            word = tl.load(words + row * width + column, mask=column < width, other=0)
            word = word.to(tl.uint32, bitcast=True)
            size = _num_bits(word)
            place = count + tl.cumsum(size, axis=0) - size
            count += tl.sum(size, axis=0)
            if count <= CAPACITY:
                while tl.max(size, axis=0) > 0:
                    lowest = _num_bits((word & (0 - word)) - 1)
                    tl.store(ids + row * CAPACITY + place, column * 32 + lowest, mask=size > 0)
                    place += 1
                    word &= word - 1
                    size -= 1
    else:
        count -= 1
    tl.store(counts + row, count)


@triton.jit
def _num_bits(word) -> tl.tensor:
    """Return how many bits of each word are set."""
    pairs = word - ((word >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    return ((((fours + (fours >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit(do_not_specialize=["turns", "limit"])
def _encode(
    ids, counts, words, sizes, data, host_words, turn, turns, rows, width, vocab, limit,
    CAPACITY: tl.constexpr, DATA_BYTES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    wait()
    at = row
    if turn is not None:
        at += (tl.load(turn) % turns) * rows
    count = tl.load(counts + row)
    size = tl.full((), 0, tl.int32)
    if (count >= 0) & (count <= limit) | (count == vocab):
        out = data + at * DATA_BYTES
        for start in range(0, tl.where(count == vocab, 0, count), BLOCK):
            entry = start + tl.arange(0, BLOCK)
            inside = entry < count
            one = tl.load(ids + row * CAPACITY + entry, mask=inside, other=0)
            before = tl.load(ids + row * CAPACITY + entry - 1, mask=inside & (entry > 0), other=-1)
            number = one - before
            length = tl.where(
                inside, 1 + (number >= 128).to(tl.int32) + (number >= 16384).to(tl.int32), 0
            )
            place = out + size + tl.cumsum(length, axis=0) - length
            low = (number & 127) + tl.where(length > 1, MORE, 0)
            middle = ((number >> 7) & 127) + tl.where(length > 2, MORE, 0)
            tl.store(place, low.to(tl.uint8), mask=inside)
            tl.store(place + 1, middle.to(tl.uint8), mask=length > 1)
            tl.store(place + 2, (number >> 14).to(tl.uint8), mask=length > 2)
            size += tl.sum(length, axis=0)
        tl.store(out + size, tl.full((), 0, tl.uint8))
        size += 1
    elif count > limit:
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            word = tl.load(words + row * width + column, mask=column < width)
            tl.store(host_words + at * width + column, word, mask=column < width)
        size += AS_WORDS
    tl.store(sizes + at, size)


@triton.jit
def _decode(data, starts, stops, words, vocab, width, BLOCK: tl.constexpr) -> None:
    """Set the bits of one token's set."""
    row = tl.program_id(0).to(tl.int64)
    wait()
    start, stop = tl.load(starts + row), tl.load(stops + row) - 1  # without its zero byte
    size = (stop - start).to(tl.int32)
    if size > 0:
        data += start
        words += row * width
        is_bitmap = tl.load(data + size - 1) >= MORE
        last = tl.full((), -1, tl.int32)
        for begin in range(0, size, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            inside = place < size
            byte = tl.load(data + place, mask=inside, other=0).to(tl.int32)
            if is_bitmap:
                _set_seven(words, byte & 127, place * 7, width, inside)
            else:
                number = _numbers(data, byte, place, inside)
                entry = last + tl.cumsum(number, axis=0)
                last += tl.sum(number, axis=0)
                bit = tl.full((BLOCK,), 1, tl.int32) << (entry % 32)
                tl.atomic_or(words + entry // 32, bit, mask=(number > 0) & (entry < vocab))


@triton.jit
def _set_seven(words, bits, entry, width, inside) -> None:
    """Set `bits` of the seven entries from `entry` on, which may lie in two words."""
    word, place = entry // 32, entry % 32
    tl.atomic_or(words + word, bits << place, mask=inside & (word < width))
    crosses = inside & (place > 25) & (word + 1 < width)
    tl.atomic_or(words + word + 1, bits >> tl.where(crosses, 32 - place, 0), mask=crosses)


@triton.jit
def _numbers(data, byte, place, inside) -> tl.tensor:
    """Return the number that ends with each byte, or 0 where none ends."""
    one = tl.load(data + place - 1, mask=inside & (place > 0), other=0).to(tl.int32)
    two = tl.load(data + place - 2, mask=inside & (place > 1), other=0).to(tl.int32)
    two = tl.where(one < MORE, 0, two)
    rest = tl.where(two < MORE, one & 127, (two & 127) + ((one & 127) << 7))
    shift = tl.where(one < MORE, 0, tl.where(two < MORE, 7, 14))
    number = (byte << shift) + tl.where(one < MORE, 0, rest)
    return tl.where(byte < MORE, number, 0)
