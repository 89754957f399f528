"""Packing of a micro-batch for Megatron-core: padding, and the tokens of a context-parallel rank.

Along cp, our attention has the tokens dealt out in turn (`deal_to_rank`). For transformer-engine's,
each sequence is cut into 2 cp equal chunks. Rank r has the chunks r and 2 cp - 1 - r, so that all
ranks have equal work (`pack_for_rank`). With sequence parallelism, the tokens of a rank are a
multiple of tp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels.runtime.upload import upload
from spmd_rl.model.held.tensor import ONE, Along
from spmd_rl.train.microbatch import MicroBatch

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Packed:
    """What one rank computes of a micro-batch.

    Shape: tokens, positions [T'] of this rank; `lengths`, `prefixes` [P] of all segments, padded;
    `rows` [m] the rank's tokens whose hidden state predicts a scored token, and `scored` [m] which
    of the micro-batch's scored tokens that is.
    """

    tokens: Tensor
    positions: Tensor
    lengths: NDArray[np.int32]
    prefixes: NDArray[np.int32]
    rows: Tensor
    scored: Tensor


def deal_to_rank(micro: MicroBatch, context: Along, multiple: int, least: int = 0) -> Packed:
    """Return this rank's part of a micro-batch, whose tokens are dealt out in turn along cp.

    So they are as `SharedTokens` has them. Segments stay whole, and `lengths` and `prefixes` are
    those of all ranks. The rest is as in `pack_for_rank`.
    """
    count, index = context.size, context.index
    whole = pack_for_rank(micro, ONE, multiple * count, least)
    if count == 1:
        return whole
    chosen = (whole.rows % count == index).nonzero()[:, 0]
    return replace(
        whole,
        tokens=whole.tokens[index::count].contiguous(),  # as kernels read them
        positions=whole.positions[index::count].contiguous(),
        rows=whole.rows[chosen] // count,
        scored=whole.scored[chosen],
    )


def pack_for_rank(micro: MicroBatch, context: Along, multiple: int, least: int = 0) -> Packed:
    """Return this rank's part of a micro-batch.

    `context` is its place along cp; its tokens become a multiple of `multiple`. The micro-batch is
    padded to `least` tokens, and as many again as all else needs. A micro-batch that stays whole is
    not copied, and the host does not wait for the device.
    """
    lengths, padded, prefixes = _padded(micro, context, multiple, least)
    if context.size == 1 and len(padded) == len(micro.lengths):
        scored = torch.arange(micro.num_scored, device=micro.tokens.device)
        return Packed(micro.tokens, micro.positions, micro.lengths, prefixes, micro.rows, scored)
    source = _sources(lengths, padded)
    mine = np.concatenate([held_positions(int(size), context) for size in padded])
    bases = np.repeat(np.cumsum(padded) - padded, padded // context.size)
    held = source[mine + bases]  # the micro-batch's token at each of the rank's, or -1
    device = micro.tokens.device
    place = np.full(len(micro.tokens), -1)
    place[held[held >= 0]] = np.flatnonzero(held >= 0)
    rows = upload(place, device)[micro.rows]
    scored = (rows >= 0).nonzero()[:, 0]
    index = upload(np.maximum(held, 0), device)
    positions = micro.positions[index].masked_fill(upload(held < 0, device), 0)
    sizes = padded.astype(np.int32)
    return Packed(micro.tokens[index], positions, sizes, prefixes, rows[scored], scored)


def _padded(
    micro: MicroBatch, context: Along, multiple: int, least: int
) -> tuple[Ints, Ints, NDArray[np.int32]]:
    """Return the lengths of the segments, those with padding, and their prefixes.

    The last segment may be padding alone, which nobody sees.
    """
    each = 2 * context.size if context.size > 1 else 1
    lengths = micro.lengths.astype(np.int64)
    padded = -(-lengths // each) * each
    total, unit = int(padded.sum()), lcm(each, multiple * context.size)
    if not (rest := -(-max(total, least) // unit) * unit - total):
        return lengths, padded, micro.prefixes
    prefixes = np.append(micro.prefixes, np.int32(-1))
    return np.append(lengths, 0), np.append(padded, rest), prefixes


def num_padded(micro: MicroBatch, context: Along) -> int:
    """Return the tokens of a micro-batch whose sequences are padded."""
    each = 2 * context.size if context.size > 1 else 1
    return int((-(-micro.lengths.astype(np.int64) // each) * each).sum())


def _sources(lengths: Ints, padded: Ints) -> Ints:
    """Return the token of the micro-batch at each padded position, -1 for padding."""
    within = np.arange(padded.sum()) - np.repeat(np.cumsum(padded) - padded, padded)
    starts = np.repeat(np.cumsum(lengths) - lengths, padded)
    return np.where(within < np.repeat(lengths, padded), starts + within, -1)


def held_positions(length: int, context: Along) -> Ints:
    """Return the positions within a sequence that a context-parallel rank has."""
    if context.size == 1:
        return np.arange(length)
    chunks = np.arange(length).reshape(2 * context.size, -1)
    return chunks[[context.index, 2 * context.size - 1 - context.index]].reshape(-1)
