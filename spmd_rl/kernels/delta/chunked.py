"""Gated delta rule in chunks, as products of matrices: gradients on GPUs.

In real numbers it is the recurrence. Its bits differ, so no forward pass of a model uses it.
Source: Yang et al., Parallelizing Linear Transformers with the Delta Rule (2024), section 3, and
Gated Delta Networks (2024), section 3.3.

Shape letters: B sequences, T tokens of all, N chunks of S tokens; K key and V value heads of sizes
D and E.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CHUNK = 64


class Chunks(NamedTuple):
    """What is computed of each chunk before the states of others are known.

    Shape: added [N, V, S, E]; read, queries and handed_on [N, V, S, D]; attention [N, V, S, S];
    left [N, V, 1, 1].
    """

    added: Tensor
    read: Tensor
    attention: Tensor
    queries: Tensor
    handed_on: Tensor
    left: Tensor


def chunked_delta(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, lengths: NDArray[np.int64]
) -> Tensor:
    """Mix sequences that begin without a state. The last chunk of each is filled up with zeros.

    Shape: q and k [T, K, D], v [T, V, E], log_decay and beta [T, V], lengths [B], all fp32; returns
    [T, V, E].
    """
    counts = -(-lengths // CHUNK)
    before = (np.cumsum(counts) - counts) * CHUNK - (np.cumsum(lengths) - lengths)
    at = torch.from_numpy(np.arange(len(q)) + np.repeat(before, lengths)).to(q.device)

    def by_chunk(x: Tensor) -> Tensor:
        rows = x.new_zeros(int(counts.sum()) * CHUNK, *x.shape[1:]).index_copy(0, at, x)
        return rows.unflatten(0, (-1, CHUNK)).transpose(1, 2)  # [N, V, S, ...]

    served = v.shape[1] // k.shape[1]
    q, k = (by_chunk(one).repeat_interleave(served, 1) for one in (q, k))
    chunks = _within_chunks(q, k, by_chunk(v), by_chunk(log_decay), by_chunk(beta))
    return _from_chunk_to_chunk(chunks, counts).transpose(1, 2).flatten(0, 1)[at]


def _within_chunks(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Chunks:
    sums = log_decay.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    # how much is left, at each token of a chunk, of what an earlier one of it added
    between = (sums[..., :, None] - sums[..., None, :]).masked_fill(~lower, 0).exp() * lower
    keys, since_start, last = k * beta[..., None], sums.exp()[..., None], sums[..., -1:]
    inverse = (keys @ k.transpose(-1, -2) * between).tril(-1)
    inverse = inverse + torch.eye(CHUNK, device=q.device)

    def solved(right: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(inverse, right, upper=False, unitriangular=True)

    return Chunks(
        added=solved(v * beta[..., None]),
        read=solved(keys * since_start),
        attention=q @ k.transpose(-1, -2) * between,
        queries=q * since_start,
        handed_on=k * (last - sums).exp()[..., None],
        left=last.exp()[..., None],
    )


def _from_chunk_to_chunk(chunks: Chunks, counts: NDArray[np.int64]) -> Tensor:
    """Take a chunk of all sequences at once, those with the most first.

    Shape: counts [B], the chunks of each; returns [N, V, S, E].
    """
    order = np.argsort(-counts, kind="stable")
    first = (np.cumsum(counts) - counts)[order]
    device = chunks.read.device
    state = chunks.read.new_zeros(
        len(counts), chunks.read.shape[1], chunks.read.shape[-1], chunks.added.shape[-1]
    )
    parts, numbers = [], []
    for place in range(counts.max(initial=0)):
        numbers.append(first[counts[order] > place] + place)
        index = torch.from_numpy(numbers[-1]).to(device)
        added, read, attention, queries, handed_on, left = (one[index] for one in chunks)
        state = state[: len(index)]
        new = added - read @ state
        parts.append(queries @ state + attention @ new)
        state = state * left + handed_on.transpose(-1, -2) @ new
    where = torch.from_numpy(np.concatenate(numbers).argsort()).to(device)
    return torch.cat(parts)[where]
