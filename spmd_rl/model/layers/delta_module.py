"""Torch module of the gated delta rule."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from spmd_rl.kernels import Rotary, TokenAttention
from spmd_rl.kernels.delta.dispatch import gated_delta_pass, gated_rms_norm
from spmd_rl.kernels.delta.rule import DeltaHeads, DeltaWeights
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
        z = z.unflatten(-1, (self.heads.values, self.heads.value_dim))
        mixed = self._mixed(qkv, b, a, attend)
        return self.out_proj(self.norm(mixed, z).flatten(1))

    def _mixed(self, qkv: Tensor, b: Tensor, a: Tensor, attend: TokenAttention) -> Tensor:
        """Return what states give of each row, zeros for padding. Shape: [T', V, E] fp32."""
        weights = DeltaWeights(self.conv1d.weight, self.dt_bias, self.A_log)
        size = len(qkv), self.heads.values, self.heads.value_dim
        mixed = qkv.new_zeros(size, dtype=torch.float32)
        for rows, states in attend.sequences(self.number):
            mixed[rows] = gated_delta_pass(qkv[rows], b[rows], a[rows], weights, self.heads, states)
        return mixed

    def _per_kind(self, qkvz: Tensor, ba: Tensor) -> list[Tensor]:
        """Return (qkv, z, b, a) of the two projections, whose rows are laid out per key head."""
        keys, _, key_dim, value_dim = self.heads
        served = self.heads.served
        widths = [key_dim, key_dim, served * value_dim, served * value_dim]
        parts = (
            part
            for rows, sizes in ((qkvz, widths), (ba, served))
            for part in rows.unflatten(-1, (keys, -1)).split(sizes, 2)
        )
        q, k, v, z, b, a = (part.flatten(1) for part in parts)
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
