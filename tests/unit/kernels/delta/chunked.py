"""Gated delta rule in chunks, as products of matrices, as peers compute it.

In real numbers it is the recurrence, with other bits.
Source: Yang et al., Parallelizing Linear Transformers with the Delta Rule (2024), section 3, and
Gated Delta Networks (2024), section 3.3.

Shape letters: B sequences, T tokens of all, N chunks of S tokens; K key and V value heads of sizes
D and E.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels.delta.rule import (
    ConvRows,
    DeltaHeads,
    DeltaWeights,
    causal_conv,
    delta_steps,
)
from spmd_rl.kernels.runtime.ragged import offsets_within

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


def chunked_gated_delta(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaWeights,
    heads: DeltaHeads,
    lengths: NDArray[np.int64],
) -> Tensor:
    """Mix whole sequences as `gated_delta` does, with other bits, and gradients for less."""
    rows = ConvRows(qkv, lengths, None, weights.num_before)
    steps = delta_steps(causal_conv(rows, weights.conv), b, a, weights, heads)
    return chunked_delta(*steps, lengths)


def chunked_delta(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, lengths: NDArray[np.int64]
) -> Tensor:
    """Mix sequences that begin without a state. The last chunk of each is filled up with zeros.

    Chunks lie in the order in which they are taken: the first ones of all sequences, then the
    second ones, those of the longest sequences first.
    Shape: q and k [T, K, D], v [T, V, E], log_decay and beta [T, V], lengths [B], all fp32; returns
    [T, V, E].
    """
    order = np.argsort(-lengths, kind="stable")
    num_chunks = -(-lengths // CHUNK)
    counts = [int((num_chunks > place).sum()) for place in range(num_chunks.max(initial=0))]
    rank = np.argsort(order)  # of each sequence among those of a place
    begins = np.concatenate([[0], np.cumsum(counts)])
    place, within = np.divmod(offsets_within(lengths), CHUNK)
    rows = (begins[place] + np.repeat(rank, lengths)) * CHUNK + within
    at = torch.from_numpy(rows).to(q.device)

    def by_chunk(x: Tensor) -> Tensor:
        rows = x.new_zeros(int(begins[-1]) * CHUNK, *x.shape[1:]).index_copy(0, at, x)
        return rows.unflatten(0, (-1, CHUNK)).transpose(1, 2)  # [N, V, S, ...]

    served = v.shape[1] // k.shape[1]
    q, k = (by_chunk(one).repeat_interleave(served, 1) for one in (q, k))
    chunks = _within_chunks(q, k, by_chunk(v), by_chunk(log_decay), by_chunk(beta))
    return _from_chunk_to_chunk(chunks, counts).transpose(1, 2).flatten(0, 1).index_select(0, at)


def _within_chunks(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Chunks:
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    # a cumulative sum; torch's own is refused on GPUs where algorithms must be deterministic
    sums = log_decay @ lower.T.float()
    # how much is left, at each token of a chunk, of what an earlier one of it added
    between = (sums[..., :, None] - sums[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    keys, since_start, last = k * beta[..., None], sums.exp()[..., None], sums[..., -1:]
    mixed = (keys @ k.transpose(-1, -2) * between).tril(-1)
    eye = torch.eye(CHUNK, device=q.device)
    inverse = torch.linalg.solve_triangular(
        mixed + eye, eye.expand_as(mixed), upper=False, unitriangular=True
    )
    return Chunks(
        added=inverse @ (v * beta[..., None]),
        read=inverse @ (keys * since_start),
        attention=q @ k.transpose(-1, -2) * between,
        queries=q * since_start,
        handed_on=k * (last - sums).exp()[..., None],
        left=last.exp()[..., None],
    )


def _from_chunk_to_chunk(chunks: Chunks, counts: Sequence[int]) -> Tensor:
    """Take so many chunks at once, each of another sequence; returns [N, V, S, E]."""
    _, num_heads, _, key_dim = chunks.read.shape
    state = chunks.read.new_zeros(counts[0], num_heads, key_dim, chunks.added.shape[-1])
    parts = []
    for part in zip(*(one.split(list(counts)) for one in chunks), strict=True):
        added, read, attention, queries, handed_on, left = part
        state = state[: len(added)]
        new = added - read @ state
        parts.append(queries @ state + attention @ new)
        state = state * left + handed_on.transpose(-1, -2) @ new
    return torch.cat(parts)
