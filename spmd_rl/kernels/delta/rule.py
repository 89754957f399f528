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

from collections.abc import Sequence
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

    @property
    def num_before(self) -> int:
        """How many earlier rows the convolution reads."""
        return self.conv.shape[-1] - 1


class DeltaHeads(NamedTuple):
    """How many heads there are, and their sizes. A key head serves equally many value heads."""

    keys: int
    values: int
    key_dim: int
    value_dim: int

    @property
    def served(self) -> int:
        """How many value heads a key head serves."""
        return self.values // self.keys

    @property
    def widths(self) -> tuple[int, int, int]:
        """How many channels all queries, keys and values have."""
        return *(self.keys * self.key_dim,) * 2, self.values * self.value_dim


class DeltaStates(NamedTuple):
    """What sequences hand on: the rows before the convolution, and the state of each value head.

    A state is transposed, so that sums over keys are along its rows.
    Shape: conv [B, W - 1, C] as the rows are stored, heads [B, V, E, D] fp32.
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
    size = len(lengths), heads.values, heads.value_dim, heads.key_dim
    conv, state = begin or (None, torch.zeros(size, device=qkv.device))
    rows = ConvRows(qkv, lengths, conv, weights.num_before)
    steps = delta_steps(causal_conv(rows, weights.conv), b, a, weights, heads)
    out, states = recurrence(steps, lengths, state)
    return out, DeltaStates(rows.last(), states)


class ConvRows:
    """The rows of sequences before the convolution, each after `count` earlier ones of its own.

    Shape: x [T, C], lengths [B], begin [B, count, C], or None for zeros.
    """

    def __init__(
        self, x: Tensor, lengths: NDArray[np.int64], begin: Tensor | None, count: int
    ) -> None:
        if begin is None:
            begin = x.new_zeros(len(lengths), count, x.shape[1])
        pairs = zip(begin, x.split(lengths.tolist()), strict=True)
        self.count = count
        self.all = torch.cat([part for pair in pairs for part in pair])
        self._lengths = lengths

    def first_taps(self) -> Tensor:
        """Return for each token where the earliest row is that its convolution reads. Shape: [T]"""
        earlier = self.count * np.arange(len(self._lengths))
        first = np.arange(self._lengths.sum()) + np.repeat(earlier, self._lengths)
        return torch.from_numpy(first).to(self.all.device)

    def last(self) -> Tensor:
        """Return the last rows of each sequence. Shape: [B, count, C]."""
        ends = torch.from_numpy(np.cumsum(self._lengths + self.count)).to(self.all.device)
        return self.all[ends[:, None] + torch.arange(-self.count, 0, device=self.all.device)]


def delta_steps(
    mixed: Tensor, b: Tensor, a: Tensor, weights: DeltaWeights, heads: DeltaHeads
) -> DeltaSteps:
    """Return what the recurrence reads of each token, of the rows after the convolution."""
    q, k, v = mixed.split(heads.widths, dim=-1)
    q, k = (_unit(one.unflatten(-1, (heads.keys, heads.key_dim))) for one in (q, k))
    values = v.unflatten(-1, (heads.values, heads.value_dim))
    log_decay, beta = gates(b, a, weights.dt_bias, weights.a_log)
    return DeltaSteps(q * heads.key_dim**-0.5, k, values, log_decay, beta)


def causal_conv(rows: ConvRows, weight: Tensor) -> Tensor:
    """Convolve each channel with its last tokens, then apply SiLU.

    The products are added from the oldest token to the newest.
    Shape: weight [C, 1, W]; returns [T, C] fp32.
    """
    wide, taps = rows.all.float(), weight.float()[:, 0]
    count = len(wide) - rows.count
    total = wide[:count] * taps[:, 0]
    for tap in range(1, rows.count + 1):
        total = total + wide[tap : tap + count] * taps[:, tap]
    total = total.index_select(0, rows.first_taps())
    return total * _sigmoid(total)


class DeltaSteps(NamedTuple):
    """What the recurrence reads of each token, all fp32.

    Shape: q and k [T, K, D], v [T, V, E], log_decay and beta [T, V].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor


def recurrence(
    steps: DeltaSteps, lengths: NDArray[np.int64], state: Tensor
) -> tuple[Tensor, Tensor]:
    """Decay the state S, correct it by a token's key and value, and read it with the query.

    S = decay S; S = S + k (beta (v - S^T k))^T; out = S^T q, for each value head.
    All sequences take a token at once, the longest first, so that those that have ended drop off.
    Shape: lengths [B], state [B, V, E, D]; returns [T, V, E] and the states.
    """
    order = np.argsort(-lengths, kind="stable")
    first = (np.cumsum(lengths) - lengths)[order]
    counts = [int((lengths > place).sum()) for place in range(lengths.max(initial=0))]
    taken = np.concatenate([first[:count] + place for place, count in enumerate(counts)])
    tokens, sequences = (torch.from_numpy(one).to(state.device) for one in (taken, order))
    in_turn = _by_value_head(steps, tokens)
    out, states = _in_turn([one.split(counts) for one in in_turn], state.index_select(0, sequences))
    in_order, in_batch = tokens.argsort(), sequences.argsort()
    return out.index_select(0, in_order), states.index_select(0, in_batch)


def _by_value_head(steps: DeltaSteps, tokens: Tensor) -> Sequence[Tensor]:
    """Return rows of steps in an order of tokens, shaped to meet states [B, V, E, D]."""
    num_values = steps.v.shape[1]
    served = num_values // steps.k.shape[1]
    key_head = torch.arange(num_values, device=tokens.device) // served
    steps = DeltaSteps(*(one.index_select(0, tokens) for one in steps))
    q, k = (one[:, key_head, None] for one in (steps.q, steps.k))
    decay = steps.log_decay.exp()[..., None, None]
    return q, k, steps.v, decay, steps.beta[..., None]


def _in_turn(steps: Sequence[Sequence[Tensor]], state: Tensor) -> tuple[Tensor, Tensor]:
    """Take the tokens of one place of all sequences at once, and drop sequences that have ended."""
    ended, rows = [], []
    for q, k, v, decay, beta in zip(*steps, strict=True):
        if len(v) < len(state):
            ended.append(state[len(v) :])
            state = state[: len(v)]
        state = _corrected(state * decay, k, v, beta)
        rows.append(_sum_over_keys(state * q))
    return torch.cat(rows), torch.cat([state, *reversed(ended)])


def _corrected(state: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Return the states that give more of a token's values where they are read with its key."""
    correction = beta * (v - _sum_over_keys(state * k))
    return state + k * correction[..., None]


def _sum_over_keys(x: Tensor) -> Tensor:
    """Sum over D by halves, for torch's own order depends on shapes. Shape: [B, V, E, D]."""
    while (size := x.shape[-1]) > 1:
        half = size // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([folded, x[..., 2 * half :]], -1) if size % 2 else folded
    return x[..., 0]


def plain_gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return norm(x) * weight * silu(gate), computed in fp32 and rounded once, to gate's dtype.

    Shape: x fp32 and gate [..., D], weight [D].
    """
    wide = gate.float()
    normed = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (normed * weight.float() * (wide * _sigmoid(wide))).to(gate.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def gates(b: Tensor, a: Tensor, dt_bias: Tensor, a_log: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logs of decays, and how much of a correction is taken. Shape: [T, V], fp32."""
    log_decay = -a_log.float().exp() * _softplus(a.float() + dt_bias.float())
    return log_decay, _sigmoid(b.float())


def _sigmoid(x: Tensor) -> Tensor:
    return (x.neg().clamp(max=MAX_EXPONENT).exp() + 1.0).reciprocal()


def _softplus(x: Tensor) -> Tensor:
    return torch.where(x > MAX_SOFTPLUS, x, x.clamp(max=MAX_SOFTPLUS).exp().log1p())
