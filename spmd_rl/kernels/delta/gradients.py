"""Gradients of the gated delta rule on NVIDIA GPUs, in chunks, as products of matrices.

The forward pass has other bits, those of the recurrence; in real numbers both are one function.
Within a chunk that begins with state H, and g the sums of log decays since it began:

    U = T (beta v) + W H                  what its tokens add to the state, with the keys k
    out = exp(g) q H + P U                P of i, j is exp(g_i - g_j) q_i k_j, for j at most i
    H' = exp(g_S) H + (exp(g_S - g) k)^T U
    T = (1 + A)^-1,  W = -T (beta exp(g) k),  A of i, j is beta_i exp(g_i - g_j) k_i k_j, j below i

One kernel finds T, W and what needs no state. One goes through the chunks of a sequence for H and
U, and back for the gradients of H' and U. One finds the gradients of the inputs, chunk by chunk.
Source: Yang et al., Gated Delta Networks (2024), section 3.3, for the form in chunks.

Shape letters: T tokens, N chunks of S tokens, V value heads, of which X are taken at once; D and E
the sizes of key and value heads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels.delta.gradient_triton import gradients, scan, within
from spmd_rl.kernels.delta.rule import DeltaHeads
from spmd_rl.kernels.runtime.ragged import offsets_within
from spmd_rl.kernels.runtime.upload import upload

CHUNK = 64
TILE = 64  # columns of a tile
SCRATCH = 1 << 30  # bytes, about, of what is kept of the heads that are taken at once


class Chunks(NamedTuple):
    """Where chunks lie, those of a sequence one after the other.

    Shape: first token [N] and number of tokens [N] of each; of each sequence the first chunk [B]
    and how many it has [B]; all int32 on the device.
    """

    first: Tensor
    tokens: Tensor
    first_chunk: Tensor
    num_chunks: Tensor

    @classmethod
    def of(cls, lengths: NDArray[np.int64], device: torch.device) -> Chunks:
        num_chunks = -(-lengths // CHUNK)
        within = offsets_within(num_chunks) * CHUNK
        first = np.repeat(np.cumsum(lengths) - lengths, num_chunks) + within
        tokens = np.minimum(np.repeat(lengths, num_chunks) - within, CHUNK)
        arrays = first, tokens, np.cumsum(num_chunks) - num_chunks, num_chunks
        return cls(*(upload(one.astype(np.int32), device) for one in arrays))


class StepGradients(NamedTuple):
    """Gradients of what the recurrence reads of each token, of each value head, fp32.

    Shape: heads [T, V, D + D + E], of query, key and values; log_decay and beta [T, V].
    """

    heads: Tensor
    log_decay: Tensor
    beta: Tensor


def delta_gradients(
    mixed: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    grad: Tensor,
    lengths: NDArray[np.int64],
    heads: DeltaHeads,
    precision: str,
) -> StepGradients:
    """Return the gradients for sequences of `lengths` that begin without a state.

    `precision` is that of products: "tf32", or "tf32x3", which is about fp32.
    Shape: mixed [T, C] as of `mix_heads`, log_decay and beta [T, V], grad [T, V, E], all fp32 and
    dense.
    """
    num_tokens, key_dim, value_dim = len(grad), heads.key_dim, heads.value_dim
    chunks = Chunks.of(lengths, mixed.device)
    width = 2 * key_dim + value_dim
    out = StepGradients(
        mixed.new_empty(num_tokens, heads.values, width),
        torch.empty_like(log_decay),
        torch.empty_like(beta),
    )
    rows = len(chunks.first) * CHUNK
    states = len(chunks.first) * key_dim * value_dim
    a_head = 4 * (rows * (CHUNK + key_dim + 2 * value_dim) + 2 * states)
    at_once = min(heads.values, max(1, SCRATCH // a_head))
    for begin in range(0, heads.values, at_once):
        count = min(at_once, heads.values - begin)
        _of_heads(mixed, log_decay, beta, grad, chunks, out, heads, begin, count, precision)
    return out


def _of_heads(
    mixed: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    grad: Tensor,
    chunks: Chunks,
    out: StepGradients,
    heads: DeltaHeads,
    begin: int,
    count: int,
    precision: str,
) -> None:
    """Write the gradients of `count` value heads from head `begin` on."""
    num_chunks, num_sequences = len(chunks.first), len(chunks.num_chunks)

    def scratch(*shape: int) -> Tensor:
        return mixed.new_empty(num_chunks, count, *shape)

    key_dim, value_dim = heads.key_dim, heads.value_dim
    inverse, w = scratch(CHUNK, CHUNK), scratch(CHUNK, key_dim)
    u, of_u = scratch(CHUNK, value_dim), scratch(CHUNK, value_dim)
    state, of_state = scratch(key_dim, value_dim), scratch(key_dim, value_dim)
    key_block, value_block = (max(16, triton.next_power_of_2(one)) for one in (key_dim, value_dim))
    given = mixed, log_decay, grad, *chunks[:2]
    sizes = (
        *(mixed.shape[1], heads.served, heads.keys * key_dim, heads.values, key_dim, value_dim),
        *(CHUNK, key_block, value_block, min(TILE, key_block), min(TILE, value_block), precision),
    )
    parts = inverse, u, of_u
    grid = (num_chunks * count,)
    within[grid](*given, beta, *parts, w, begin, count, *sizes, num_warps=4)
    for rows, kept, is_reverse in ((u, state, False), (of_u, of_state, True)):
        scan[(num_sequences * count, triton.cdiv(value_dim, TILE))](
            *given, *chunks[2:], w, rows, kept, begin, count, is_reverse, *sizes, num_warps=4
        )
    gradients[grid](
        *given, beta, *parts, state, of_state, *out, begin, count, *sizes,
        num_warps=8, num_stages=1,
    )  # fmt: skip
