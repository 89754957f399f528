"""Kept sets between the engine and the trainer: encoded by the one, decoded by the other.

In the trainer they stay encoded until a chunk of logits needs them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels.vocab.kept_words import AS_WORDS, EncodedRows, KeptRows, pack_bits
from spmd_rl.types.kept_sets import decode_sets


def encoded_rows(kept: KeptRows, vocab: int) -> EncodedRows:
    """Return the encoded sets of one step, on the same device. On the CPU they stay words."""
    if kept.words.is_cuda:
        from spmd_rl.kernels.vocab.kept_sets_triton import encode_rows

        out = EncodedRows.empty((1, len(kept.words)), vocab, kept.words.device)
        encode_rows(kept, out)
        return out.step(0, len(kept.words))
    sizes = torch.where(kept.replays, AS_WORDS, 0)
    return EncodedRows(sizes, torch.empty(len(sizes), 0, dtype=torch.uint8), kept.words, vocab)


@dataclass(frozen=True)
class KeptSets:
    """The encoded sets of M tokens: that of token m is `data[starts[m] : stops[m]]`.

    Shape: data [B] uint8; starts, stops [M] int64.
    """

    data: Tensor
    starts: Tensor
    stops: Tensor

    def select(self, rows: Tensor) -> KeptSets:
        """Return the sets of some tokens. Shape: rows [R] int64."""
        return KeptSets(self.data, self.starts[rows], self.stops[rows])

    def words(self, rows: slice, vocab: int) -> Tensor:
        """Return the sets of some tokens; an empty set is the whole vocabulary.

        Shape: returns [R, W] int32.
        """
        starts, stops = self.starts[rows], self.stops[rows]
        if self.data.is_cuda:
            from spmd_rl.kernels.vocab.kept_sets_triton import decoded

            return decoded(self.data, starts, stops, vocab)
        return pack_bits(_decoded(self.data.numpy(), starts.numpy(), stops.numpy(), vocab))


def _decoded(
    data: NDArray[np.uint8], starts: NDArray[np.int64], stops: NDArray[np.int64], vocab: int
) -> Tensor:
    """Return which entries are kept. Shape: returns [R, V] bool."""
    kept = np.zeros((len(starts), vocab), np.bool_)
    if len(starts):
        bounds = zip(starts.tolist(), stops.tolist(), strict=True)
        counts, ids = decode_sets(np.concatenate([data[start:stop] for start, stop in bounds]))
        kept[np.repeat(np.arange(len(counts)), counts), ids] = True
        kept[counts == 0] = True
    return torch.from_numpy(kept)
