"""Encoding of kept sets: the tokens that top-k, top-p and min-p kept for each draw. numpy only.

The sets of a sample are one run of bytes, a set for each token, in order. Each set ends with a zero
byte, the only one in it. An empty set, of that byte alone, says that nothing was filtered.

    ids     the ascending ids as differences (the first: the id plus 1), 7 bits a byte, lowest
            first; a byte of 128 or more is followed by the next byte of the same number
    bitmap  the vocabulary 7 ids a byte, lowest first, up to the last id of the set; each byte
            has 128 added, and so has the last one before the zero, which no set of ids has

A set of more than an eighth of the vocabulary is a bitmap.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BITMAP_SHARE = 8  # a set of more than the vocabulary's size divided by this is a bitmap
NO_SET = b"\0"
_BITS = 7  # of a byte
_PLACES = 1 << np.arange(_BITS)  # of the bits of a byte
_MORE = 1 << _BITS  # marks a byte that is not the last of its number
MAX_NUMBER_BYTES = 3  # of a difference of ids, so below 2^21


def encode_sets(kept: NDArray[np.bool_]) -> list[bytes]:
    """Return the encoding of each row's set. Shape: kept [M, V].

    Rows are encoded one by one, so that what one takes stays in the processor's cache.
    """
    most_ids = kept.shape[1] // BITMAP_SHARE
    return [_bitmap(row) if np.count_nonzero(row) > most_ids else _ids(row) for row in kept]


def _ids(kept: NDArray[np.bool_]) -> bytes:
    rest = np.diff(np.flatnonzero(kept), prepend=-1)
    out = (rest % _MORE).astype(np.uint8)
    last = np.arange(len(rest))  # place in `out` of the last byte so far of each number in `rest`
    while (goes_on := rest >= _MORE).any():
        last, rest = last[goes_on], rest[goes_on] >> _BITS
        out[last] += _MORE
        out = np.insert(out, last + 1, (rest % _MORE).astype(np.uint8))
        last += 1 + np.arange(len(last))
    return out.tobytes() + NO_SET


def _bitmap(kept: NDArray[np.bool_]) -> bytes:
    num_bytes = int(np.flatnonzero(kept)[-1]) // _BITS + 1
    bits = np.zeros(num_bytes * _BITS, np.uint8)
    bits[: len(kept)] = kept[: len(bits)]
    values = bits.reshape(-1, _BITS) @ _PLACES + _MORE
    return values.astype(np.uint8).tobytes() + NO_SET


def decode_sets(data: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sizes and the ids of encoded sets that lie end to end.

    Shape: data [B]; returns [M] and [sum of the sizes].
    """
    ends = set_ends(data)
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    is_bitmap = (ends - starts > 1) & (data[ends - 2] >= _MORE)
    token = np.repeat(np.arange(len(ends)), ends - starts)
    counts, ids = _decode_ids(data, token, ~is_bitmap)
    if not is_bitmap.any():
        return counts, ids
    parts = np.split(ids, np.cumsum(counts)[:-1])
    for row in np.flatnonzero(is_bitmap).tolist():
        groups = data[starts[row] : ends[row] - 1, None]
        parts[row] = np.flatnonzero(np.unpackbits(groups, 1, _BITS, bitorder="little"))
        counts[row] = len(parts[row])
    return counts, np.concatenate(parts)


def _decode_ids(
    data: NDArray[np.uint8], token: NDArray[np.int64], has_ids: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return sizes and ids of the sets of ids; other sets are empty. Shape: token [B]."""
    bytes_of_ids = (data > 0) & has_ids[token]
    digits, token = data[bytes_of_ids].astype(np.int64), token[bytes_of_ids]
    is_last = digits < _MORE
    last = np.flatnonzero(is_last)
    first = np.concatenate([[0], last[:-1] + 1]).astype(np.int64)[: len(last)]
    place = np.arange(len(digits)) - np.repeat(first, last - first + 1)
    values = (digits % _MORE) << _BITS * place
    sums = np.cumsum(values)[last]  # ids plus 1, and all numbers of earlier sets
    counts = np.bincount(token[last], minlength=len(has_ids))
    before = np.concatenate([[0], sums])[(np.cumsum(counts) - counts)]
    return counts, sums - np.repeat(before, counts) - 1


def set_ends(data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return where each set ends, its zero included. Shape: data [B]; returns [M]."""
    return np.flatnonzero(data == 0) + 1
