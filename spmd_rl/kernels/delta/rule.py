"""Gated delta rule of sequences, token after token, in fp32.

It is the contract's only form: trainer and engine run it alike. What a sequence hands on to its
next tokens is its state, which is never rounded, and the last rows before the convolution. No sum
is over more than one token, and each has one order. So a row has the same bits wherever its
sequence was cut, and whatever runs beside it. Gradients are those of the same loop.
The sigmoids are spelled out, for torch's have other bits at the end of a buffer (activation.py).
Source: Yang et al., Gated Delta Networks: Improving Mamba2 with Delta Rule (2024).

Shape letters: B sequences, T tokens of all, laid end to end; C channels, W taps; K key and V value
heads of sizes D and E.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DELTA_RULE = "recurrence-v1"
NORM_EPS = 1e-6  # of queries and keys
# the largest exponents: of a sigmoid, so that its gradient is finite, and of a softplus
MAX_EXPONENT, MAX_SOFTPLUS = 80.0, 20.0


class DeltaWeights(NamedTuple):
    """Shape: conv [C, 1, W], dt_bias [V] and a_log [V]."""

    conv: Tensor
    dt_bias: Tensor
    a_log: Tensor


class DeltaHeads(NamedTuple):
    """How many heads there are, and their sizes. A key head serves equally many value heads."""

    keys: int
    values: int
    key_dim: int
    value_dim: int


class DeltaStates(NamedTuple):
    """What sequences hand on: the rows before the convolution, and the state of each value head.

    Shape: conv [B, W - 1, C] as the rows are stored, heads [B, V, D, E] fp32.
    """

    conv: Tensor
    heads: Tensor


def gated_delta(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaWeights,
    heads: DeltaHeads,
    lengths: NDArray[np.int64],
    begin: DeltaStates | None = None,
) -> tuple[Tensor, DeltaStates]:
    """Mix `lengths` new tokens of each sequence, after what it had before: nothing without `begin`.

    Shape: qkv [T, C] before the convolution, b and a [T, V], lengths [B], at least 1 each; returns
    [T, V, E] fp32.
    """
    if begin is None:
        size = len(lengths), heads.values, heads.key_dim, heads.value_dim
        rows = qkv.new_zeros(len(lengths), weights.conv.shape[-1] - 1, qkv.shape[1])
        begin = DeltaStates(rows, torch.zeros(size, device=qkv.device))
    mixed, conv = causal_conv(qkv, weights.conv, lengths, begin.conv)
    key_width = heads.keys * heads.key_dim
    q, k, v = mixed.split([key_width, key_width, heads.values * heads.value_dim], dim=-1)
    q, k = (_unit(one.unflatten(-1, (heads.keys, heads.key_dim))) for one in (q, k))
    values = v.unflatten(-1, (heads.values, heads.value_dim))
    beta = _sigmoid(b.float())
    decay = (-weights.a_log.float().exp() * _softplus(a.float() + weights.dt_bias.float())).exp()
    steps = DeltaSteps(q * heads.key_dim**-0.5, k, values, decay, beta)
    out, states = recurrence(steps, lengths, begin.heads)
    return out, DeltaStates(conv, states)


def causal_conv(
    x: Tensor, weight: Tensor, lengths: NDArray[np.int64], begin: Tensor
) -> tuple[Tensor, Tensor]:
    """Convolve each channel with its last tokens, then apply SiLU; return the last rows too.

    The products are added from the oldest token to the newest.
    Shape: x [T, C], weight [C, 1, W], lengths [B], begin [B, W - 1, C]; returns [T, C] fp32 and the
    last rows like `begin`.
    """
    before = weight.shape[-1] - 1
    parts = [part for pair in zip(begin, x.split(lengths.tolist()), strict=True) for part in pair]
    rows = torch.cat(parts)
    ends = torch.from_numpy(np.cumsum(lengths + before)).to(x.device)
    last = rows[ends[:, None] + torch.arange(-before, 0, device=x.device)]
    # where a row's first tap is: beyond the rows of other sequences and those before them
    first = np.arange(len(x)) + np.repeat(before * np.arange(len(lengths)), lengths)
    wide, taps = rows.float(), weight.float()[:, 0]
    num_rows = len(rows) - before
    total = wide[:num_rows] * taps[:, 0]
    for tap in range(1, before + 1):
        total = total + wide[tap : tap + num_rows] * taps[:, tap]
    total = total[torch.from_numpy(first).to(x.device)]
    return total * _sigmoid(total), last


class DeltaSteps(NamedTuple):
    """What the recurrence reads of each token, all fp32.

    Shape: q and k [T, K, D], v [T, V, E], decay and beta [T, V].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor


def recurrence(
    steps: DeltaSteps, lengths: NDArray[np.int64], state: Tensor
) -> tuple[Tensor, Tensor]:
    """Decay the state S, correct it by a token's key and value, and read it with the query.

    S = decay S; S = S + k (beta (v - S^T k))^T; out = S^T q, for each value head.
    All sequences take a token at once, the longest first, so that those that have ended drop off.
    Shape: lengths [B], state [B, V, D, E]; returns [T, V, E] and the states.
    """
    order = np.argsort(-lengths, kind="stable")
    first = (np.cumsum(lengths) - lengths)[order]
    counts = [int((lengths > place).sum()) for place in range(lengths.max(initial=0))]
    taken = np.concatenate([first[:count] + place for place, count in enumerate(counts)])
    device = steps.v.device
    tokens, sorted_ = (torch.from_numpy(index).to(device) for index in (taken, order))
    served = steps.v.shape[1] // steps.k.shape[1]
    key_head = torch.arange(steps.v.shape[1], device=device) // served
    q, k = ((one[tokens][:, key_head, :, None]).split(counts) for one in (steps.q, steps.k))
    v, decay, beta = (one[tokens].split(counts) for one in steps[2:])
    state, ended, rows = state[sorted_], [], []
    for place, count in enumerate(counts):
        if count < len(state):
            ended.append(state[count:])
            state = state[:count]
        state = state * decay[place][..., None, None]
        read = _sum_over_keys(state * k[place])
        correction = beta[place][..., None] * (v[place] - read)
        state = state + k[place] * correction[:, :, None]
        rows.append(_sum_over_keys(state * q[place]))
    states = torch.cat([state, *reversed(ended)])
    return torch.cat(rows)[tokens.argsort()], states[sorted_.argsort()]


def _sum_over_keys(x: Tensor) -> Tensor:
    """Sum over D by halves, for torch's own order depends on shapes. Shape: [B, V, D, E]."""
    while (size := x.shape[2]) > 1:
        half = size // 2
        folded = x[:, :, :half] + x[:, :, half : 2 * half]
        x = torch.cat([folded, x[:, :, 2 * half :]], 2) if size % 2 else folded
    return x[:, :, 0]


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return norm(x) * weight * silu(gate), computed in fp32 and rounded once, to gate's dtype.

    Shape: x fp32 and gate [..., D], weight [D].
    """
    wide = gate.float()
    normed = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (normed * weight.float() * (wide * _sigmoid(wide))).to(gate.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def _sigmoid(x: Tensor) -> Tensor:
    return (x.neg().clamp(max=MAX_EXPONENT).exp() + 1.0).reciprocal()


def _softplus(x: Tensor) -> Tensor:
    return torch.where(x > MAX_SOFTPLUS, x, x.clamp(max=MAX_SOFTPLUS).exp().log1p())
