"""Torch module of the gated delta rule.

It keeps each token's rows before the convolution, as attention keeps keys: in pages, so that
prefixes are shared and sequences fork as ever. Each pass computes the whole sequence again, from
its first token. That is exact and slow: a decoded token costs as much as its whole history. An
engine that keeps states of sequences will replace it, with the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from spmd_rl.kernels import Rotary, TokenAttention
from spmd_rl.kernels.delta.rule import DeltaHeads, DeltaWeights, gated_delta, gated_rms_norm
from spmd_rl.model.linear import Linear

if TYPE_CHECKING:
    from spmd_rl.model.layers.delta import GatedDelta


class DeltaMixer(nn.Module):
    """Gated delta rule of block `number`.

    `A_log` and `dt_bias` are trained. Like all weights they are rounded to the dtype of a pass, and
    the same in trainer and engine; what is computed of them is fp32.
    """

    def __init__(self, spec: GatedDelta, number: int) -> None:
        super().__init__()
        self.number = number
        self.spec = spec
        self.heads = DeltaHeads(
            spec.num_key_heads, spec.num_value_heads, spec.key_head_dim, spec.value_head_dim
        )
        self.dt_bias = nn.Parameter(torch.ones(spec.num_value_heads))
        self.A_log = nn.Parameter(torch.zeros(spec.num_value_heads))
        for projection, rows in spec.projections.items():
            self.add_module(projection, Linear(spec.hidden_size, rows, bias=False))
        self.conv1d = ConvWeight(spec.conv_width, spec.conv_size)
        self.norm = GatedNorm(spec.value_head_dim, spec.rms_eps)
        self.out_proj = Linear(spec.value_width, spec.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: Rotary, attend: TokenAttention) -> Tensor:
        projected = [getattr(self, projection)(x) for projection in self.spec.projections]
        qkv, z, b, a = self._per_kind(*projected) if self.spec.fused else projected
        weights = DeltaWeights(self.conv1d.weight, self.dt_bias, self.A_log)
        mixed = []
        for new, rows in attend.history(self.number, qkv, b, a):
            mixed.append(gated_delta(*rows, weights, self.heads)[new.start - new.stop :])
        whole = torch.cat(mixed)
        padding = whole.new_zeros(len(x) - len(whole), *whole.shape[1:])
        out = self.norm(torch.cat([whole, padding]), z.unflatten(-1, whole.shape[1:]))
        return self.out_proj(out.flatten(1))

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
