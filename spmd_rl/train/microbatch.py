"""Cutting a rank's sequences into micro-batches, and laying one out for the model.

Every rank runs the same number of micro-batches, because each is a collective; a rank with fewer
sequences runs empty ones, a single token that nothing is learned from.

Shape letters: T tokens, N sequences, M tokens in the loss mask, of one micro-batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels.runtime.upload import upload
from spmd_rl.train import shared_prefix
from spmd_rl.types.batch import Batch
from spmd_rl.types.partition import balanced_partition


def num_needed(lengths: Sequence[int], max_tokens: int) -> int:
    """How many balanced micro-batches it takes for each to fit the budget, or the longest sequence
    if that is more.

    One fewer would not do. Partitions of many sequences take long, so few counts are tried: ever
    larger ones, then by bisection.
    """
    if not lengths:
        return 0
    limit = max(max_tokens, *lengths)

    def fits(count: int) -> bool:
        return all(
            sum(lengths[i] for i in part) <= limit for part in balanced_partition(lengths, count)
        )

    too_few, step = -(-sum(lengths) // limit) - 1, 1
    while not fits(too_few + step):
        too_few, step = too_few + step, 2 * step
    return bisect_left(range(too_few + 1, too_few + step), True, key=fits) + too_few + 1


def split(lengths: Sequence[int], count: int) -> list[list[int]]:
    """The sequences as `count` parts of balanced length, empty parts last."""
    return sorted(balanced_partition(lengths, count), key=lambda part: part or [len(lengths)])


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. `rows` are the tokens whose hidden state predicts a token of the mask.

    Shape: tokens, positions [T] int64; lengths, prefixes [P] on the host, as in `prefixes.Pieces`;
    rows, targets, sequence [M] int64; inv_temperature, weight, advantages, roll [M] fp32; versions
    [M] int32.
    """

    tokens: Tensor
    positions: Tensor
    lengths: NDArray[np.int32]
    prefixes: NDArray[np.int32]
    rows: Tensor
    targets: Tensor
    sequence: Tensor
    inv_temperature: Tensor
    weight: Tensor
    advantages: Tensor
    roll: Tensor
    versions: Tensor

    @property
    def num_scored(self) -> int:
        return len(self.rows)


def lay_out(batch: Batch, device: torch.device) -> MicroBatch:
    """The micro-batch of these sequences; where there is nothing to score, one token and an empty
    mask.

    Prompts are shared on the CPU, whose attention can read them.
    """
    if not batch.mask.any():
        return _empty(device)
    pieces = shared_prefix.shared(batch) if device.type == "cpu" else shared_prefix.whole(batch)
    sequence = np.repeat(np.arange(batch.num_sequences), batch.lengths)
    positions = np.arange(batch.num_tokens) - (np.cumsum(batch.lengths) - batch.lengths)[sequence]
    scored = np.flatnonzero(batch.mask)
    sequence = sequence[scored]

    def tensor(array: NDArray[np.generic], dtype: torch.dtype) -> Tensor:
        return upload(array, device).to(dtype)

    return MicroBatch(
        tokens=tensor(batch.tokens[pieces.source], torch.int64),
        positions=tensor(positions[pieces.source], torch.int64),
        lengths=pieces.lengths,
        prefixes=pieces.prefixes,
        rows=tensor(pieces.place[scored - 1], torch.int64),
        targets=tensor(batch.tokens[scored], torch.int64),
        sequence=tensor(sequence, torch.int64),
        inv_temperature=tensor(inverse_temperature(batch.temperature)[sequence], torch.float32),
        weight=tensor(batch.weight[scored], torch.float32),
        advantages=tensor(batch.advantages[scored], torch.float32),
        roll=tensor(batch.rollout_logprobs[scored], torch.float32),
        versions=tensor(batch.versions[scored], torch.int32),
    )


def _empty(device: torch.device) -> MicroBatch:
    index, number = (
        torch.zeros(0, dtype=dtype, device=device) for dtype in (torch.int64, torch.float32)
    )
    one = torch.zeros(1, dtype=torch.int64, device=device)
    return MicroBatch(
        tokens=one,
        positions=one,
        lengths=np.ones(1, np.int32),
        prefixes=np.full(1, -1, np.int32),
        rows=index,
        targets=index,
        sequence=index,
        inv_temperature=number,
        weight=number,
        advantages=number,
        roll=number,
        versions=index.int(),
    )


def inverse_temperature(temperature: NDArray[np.float32]) -> NDArray[np.float32]:
    """1 / T rounded to fp32 on the host, as the engine rounds it; greedy samples (T = 0) are scored
    at 1.
    """
    return np.float32(1) / np.where(temperature == 0, np.float32(1), temperature).astype(np.float32)
