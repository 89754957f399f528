"""Torch module of the gated delta rule.

It keeps each token's rows before the convolution, as attention keeps keys: in pages, so that
prefixes are shared and sequences fork as ever. Each pass computes the whole sequence again, from
its first token. That is exact and slow: a decoded token costs as much as its whole history. An
engine that keeps states of sequences will replace it, with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from spmd_rl.kernels import Rotary, TokenAttention
from spmd_rl.kernels.delta.rule import DeltaHeads, DeltaWeights, gated_delta, gated_rms_norm
from spmd_rl.model.linear import Linear


class DeltaMixer(nn.Module):
    """Gated delta rule of block `number`, with so many rows of each of its `projections`.

    With `fused` there are two of them, each laid out per key head.
    `A_log` and `dt_bias` are trained. Like all weights they are rounded to the dtype of a pass, and
    the same in trainer and engine; what is computed of them is fp32.
    """

    def __init__(
        self,
        number: int,
        *,
        hidden_size: int,
        heads: DeltaHeads,
        projections: Mapping[str, int],
        fused: bool,
        conv_size: int,
        rms_eps: float,
    ) -> None:
        super().__init__()
        self.number = number
        self.heads = heads
        self.fused = fused
        self.projections = tuple(projections)
        self.dt_bias = nn.Parameter(torch.ones(heads.values))
        self.A_log = nn.Parameter(torch.zeros(heads.values))
        for projection, rows in projections.items():
            self.add_module(projection, Linear(hidden_size, rows, bias=False))
        value_width = heads.values * heads.value_dim
        channels = 2 * heads.keys * heads.key_dim + value_width
        self.conv1d = ConvWeight(channels, conv_size)
        self.norm = GatedNorm(heads.value_dim, rms_eps)
        self.out_proj = Linear(value_width, hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: Rotary, attend: TokenAttention) -> Tensor:
        projected = [getattr(self, projection)(x) for projection in self.projections]
        qkv, z, b, a = self._per_kind(*projected) if self.fused else projected
        weights = DeltaWeights(self.conv1d.weight, self.dt_bias, self.A_log)
        mixed = []
        for new, (qkv_rows, b_rows, a_rows) in attend.history(self.number, qkv, b, a):
            whole = gated_delta(qkv_rows, b_rows, a_rows, weights, self.heads)
            mixed.append(whole[new.start - new.stop :])
        out = torch.cat(mixed)
        padding = out.new_zeros(len(x) - len(out), *out.shape[1:])
        normed = self.norm(torch.cat([out, padding]), z.unflatten(-1, out.shape[1:]))
        return self.out_proj(normed.flatten(1))

    def _per_kind(self, qkvz: Tensor, ba: Tensor) -> list[Tensor]:
        """Return (qkv, z, b, a) of the two projections, whose rows are laid out per key head."""
        keys, values, key_dim, value_dim = self.heads
        served = values // keys
        widths = [key_dim, key_dim, served * value_dim, served * value_dim]
        q, k, v, z = (
            one.flatten(1) for one in qkvz.unflatten(-1, (keys, -1)).split(widths, dim=-1)
        )
        b, a = (one.flatten(1) for one in ba.unflatten(-1, (keys, -1)).split(served, dim=-1))
        return [torch.cat([q, k, v], dim=-1), z, b, a]


class ConvWeight(nn.Module):
    """Holder of a depthwise convolution's weight, by its name in folders."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, size))


class GatedNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated_rms_norm(x, gate, self.weight, self.eps)
