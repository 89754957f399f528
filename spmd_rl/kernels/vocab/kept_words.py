"""Kept sets on the device: which entries of the vocabulary top-k, top-p and min-p kept of a row.

A row's set is one bit an entry, 32 entries a word, lowest first. Log-probs take sets in this form.
Between the engine and the trainer sets travel encoded (`spmd_rl.types.kept_sets`), as most hold a
few of a hundred thousand entries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.types.kept_sets import MAX_NUMBER_BYTES, encode_sets

WORD_BITS = 32
CAPACITY = 2048  # ids of a row that are encoded on the device
DATA_BYTES = CAPACITY * MAX_NUMBER_BYTES + 4  # with the zero byte at the end
AS_WORDS = -1  # the size of a set that the host encodes


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
    kept = unpack_bits(torch.from_numpy(words), vocab).numpy()
    kept[kept.all(1)] = False
    return encode_sets(kept)


class EncodedRows(NamedTuple):
    """Encoded sets of the rows of one step, or of the last T steps, for the host to read.

    A set has `sizes` bytes of `data`, none if its row does not replay. It is in `words` if its size
    is AS_WORDS. `vocab` is the size of the vocabulary.
    Shape: sizes [T, N] int32, data [T, N, DATA_BYTES] uint8, words [T, N, W] int32, or without T.
    """

    sizes: Tensor
    data: Tensor
    words: Tensor
    vocab: int

    @classmethod
    def empty(cls, shape: tuple[int, int], vocab: int, device: torch.device | None) -> EncodedRows:
        """Return room for `shape` (T, N) on a device, or in pinned memory of the host."""
        where: dict[str, Any] = {"pin_memory": True} if device is None else {"device": device}
        sizes = torch.empty(shape, dtype=torch.int32, **where)
        data = torch.empty(*shape, DATA_BYTES, dtype=torch.uint8, **where)
        return cls(
            sizes, data, torch.empty(*shape, num_words(vocab), dtype=torch.int32, **where), vocab
        )

    def step(self, step: int, num_rows: int) -> EncodedRows:
        """Return the first rows of one step."""
        sizes, data, words = (tensor[step, :num_rows] for tensor in self[:3])
        return EncodedRows(sizes, data, words, self.vocab)

    def to_host(self) -> EncodedRows:
        """Return a copy on the host, queued without waiting; no copy of host memory."""
        sizes, data, words = (one.to("cpu", non_blocking=True) for one in self[:3])
        return EncodedRows(sizes, data, words, self.vocab)


def read_rows(encoded: EncodedRows) -> list[bytes]:
    """Return the encoded set of each row of one step, which is on the host."""
    sizes, width = encoded.sizes.tolist(), encoded.data.shape[1]
    data: NDArray[np.uint8] = encoded.data.numpy().reshape(-1)
    sets = [
        data[row * width : row * width + size].tobytes() if size > 0 else b""
        for row, size in enumerate(sizes)
    ]
    large = [row for row, size in enumerate(sizes) if size == AS_WORDS]
    if large:
        words = encode_words(encoded.words[large].numpy(), encoded.vocab)
        for row, encoding in zip(large, words, strict=True):
            sets[row] = encoding
    return sets
