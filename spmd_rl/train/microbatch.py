"""Cutting a rank's sequences into micro-batches, and laying one out for the model.

Every rank runs the same number of micro-batches, because each is a collective; a rank with fewer sequences runs
empty ones, a single token that nothing is learned from.

Shape letters: T tokens, N sequences, M tokens in the loss mask, of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.partition import balanced
from spmd_rl.types import Batch


def num_needed(lengths: Sequence[int], max_tokens: int) -> int:
    """The least number of balanced micro-batches that each fit the budget; a longer sequence goes alone."""
    if not lengths:
        return 0
    limit = max(max_tokens, *lengths)
    count = -(-sum(lengths) // limit)
    while any(sum(lengths[i] for i in part) > limit for part in balanced(lengths, count)):
        count += 1
    return count


def split(lengths: Sequence[int], count: int) -> list[list[int]]:
    """The sequences as `count` parts of balanced length, empty parts last."""
    return sorted(balanced(lengths, count), key=lambda part: part or [len(lengths)])


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. `rows` are the tokens whose hidden state predicts a token of the mask.

    Shape: tokens, positions [T] int64; lengths [N] on the host; rows, targets, sequence [M] int64;
    inv_temperature, weight, advantages, roll [M] fp32; versions [M] int32.
    """

    tokens: Tensor
    positions: Tensor
    lengths: NDArray[np.int32]
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
    """The micro-batch of these sequences; of none, one token and an empty mask."""
    lengths = batch.lengths if batch.num_sequences else np.ones(1, np.int32)
    tokens = batch.tokens if batch.num_sequences else np.zeros(1, np.int32)
    starts = np.cumsum(lengths) - lengths
    scored = np.flatnonzero(batch.mask)
    sequence = np.repeat(np.arange(batch.num_sequences), batch.lengths)[scored]

    def tensor(array: NDArray[np.generic], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, dtype)

    return MicroBatch(
        tokens=tensor(tokens, torch.int64),
        positions=tensor(np.arange(len(tokens)) - np.repeat(starts, lengths), torch.int64),
        lengths=lengths,
        rows=tensor(scored - 1, torch.int64),
        targets=tensor(batch.tokens[scored], torch.int64),
        sequence=tensor(sequence, torch.int64),
        inv_temperature=tensor(inverse_temperature(batch.temperature)[sequence], torch.float32),
        weight=tensor(batch.weight[scored], torch.float32),
        advantages=tensor(batch.advantages[scored], torch.float32),
        roll=tensor(batch.roll_logprobs[scored], torch.float32),
        versions=tensor(batch.versions[scored], torch.int32),
    )


def inverse_temperature(temperature: NDArray[np.float32]) -> NDArray[np.float32]:
    """1 / T rounded to fp32 on the host, as the engine rounds it; greedy samples (T = 0) are scored at 1."""
    return np.float32(1) / np.where(temperature == 0, np.float32(1), temperature).astype(np.float32)
