"""Gated delta rule of one sequence, token after token, in fp32.

It is the contract's only form: trainer and engine run it alike, from the rows that they stored. The
state is never rounded, and no sum is over more than one token. Thus the bits of a row depend on its
own sequence alone, up to itself. Gradients are those of the same loop.
The sigmoids are spelled out, for torch's have other bits at the end of a buffer (activation.py).
Source: Yang et al., Gated Delta Networks: Improving Mamba2 with Delta Rule (2024).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
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


def gated_delta(
    qkv: Tensor, b: Tensor, a: Tensor, weights: DeltaWeights, heads: DeltaHeads
) -> Tensor:
    """Mix a whole sequence, from its first token on.

    Shape: qkv [S, C] before the convolution, b and a [S, V]; returns [S, V, value_dim] fp32.
    """
    key_width = heads.keys * heads.key_dim
    q, k, v = causal_conv(qkv, weights.conv).split(
        [key_width, key_width, heads.values * heads.value_dim], dim=-1
    )
    q, k = (_unit(one.unflatten(-1, (heads.keys, heads.key_dim))) for one in (q, k))
    values = v.unflatten(-1, (heads.values, heads.value_dim))
    beta = _sigmoid(b.float())
    decay = (-weights.a_log.float().exp() * _softplus(a.float() + weights.dt_bias.float())).exp()
    return recurrence(q * heads.key_dim**-0.5, k, values, decay, beta)


def causal_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve each channel with its last tokens, then apply SiLU.

    The products are added from the oldest token to the newest; those before the first are zero.
    Shape: x [S, C], weight [C, 1, W].
    """
    size = weight.shape[-1]
    wide, taps = x.float(), weight.float()[:, 0]
    rows = torch.cat([wide.new_zeros(size - 1, x.shape[1]), wide])
    total = rows[: len(x)] * taps[:, 0]
    for tap in range(1, size):
        total = total + rows[tap : tap + len(x)] * taps[:, tap]
    return total * _sigmoid(total)


def recurrence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Decay the state S, correct it by a token's key and value, and read it with the query.

    S = decay S; S = S + k (beta (v - S^T k))^T; out = S^T q, for each value head.
    Shape: q and k [S, K, D], v [S, V, E], decay and beta [S, V], all fp32; returns [S, V, E].
    """
    num_values = v.shape[1]
    key_head = torch.arange(num_values, device=k.device) // (num_values // k.shape[1])
    q, k = q[:, key_head, :, None], k[:, key_head, :, None]
    state = v.new_zeros(*k.shape[1:3], v.shape[-1])
    rows = []
    for token in range(len(v)):
        state = state * decay[token, :, None, None]
        read = (state * k[token]).sum(1)
        correction = beta[token, :, None] * (v[token] - read)
        state = state + k[token] * correction[:, None]
        rows.append((state * q[token]).sum(1))
    return torch.stack(rows)


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
