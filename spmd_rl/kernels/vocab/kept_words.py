"""Kept sets on the device: which entries of the vocabulary top-k, top-p and min-p kept of a row.

A row's set is one bit an entry, 32 entries a word, lowest first. Log-probs take sets in this form.
Between the engine and the trainer sets travel encoded (`spmd_rl.types.kept_sets`), as most hold a
few of a hundred thousand entries.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.types.kept_sets import encode_sets

WORD_BITS = 32


def num_words(vocab: int) -> int:
    return -(-vocab // WORD_BITS)


class KeptRows(NamedTuple):
    """Sets that a draw writes to `words`, for the rows where `replays` is set.

    The other rows get the whole vocabulary. Shape: replays [M] bool, words [M, W] int32.
    """

    replays: Tensor
    words: Tensor

    @classmethod
    def empty(cls, replays: Tensor, vocab: int) -> KeptRows:
        shape = len(replays), num_words(vocab)
        return cls(replays, torch.empty(shape, dtype=torch.int32, device=replays.device))


def pack_bits(kept: Tensor) -> Tensor:
    """Return the words of sets on the CPU. Shape: [M, V] bool; returns [M, W] int32."""
    packed = np.packbits(kept.numpy(), axis=1, bitorder="little")
    words = np.zeros((len(kept), num_words(kept.shape[1]) * WORD_BITS // 8), np.uint8)
    words[:, : packed.shape[1]] = packed
    return torch.from_numpy(words.view(np.int32))


def unpack_bits(words: Tensor, vocab: int) -> Tensor:
    """Return which entries are kept, on the CPU. Shape: [M, W] int32; returns [M, V] bool."""
    bits = np.unpackbits(words.numpy().view(np.uint8), axis=1, count=vocab, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_))


def encode_words(words: NDArray[np.int32], vocab: int) -> list[bytes]:
    """Return the encoding of each row's set. A set of the whole vocabulary becomes an empty one.

    Shape: words [M, W].
    """
    row, ids = unpack_bits(torch.from_numpy(words), vocab).numpy().nonzero()
    counts = np.bincount(row, minlength=len(words))
    is_whole = counts == vocab
    return encode_sets(np.where(is_whole, 0, counts), ids[~is_whole[row]], vocab)
