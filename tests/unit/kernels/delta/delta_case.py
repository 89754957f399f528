"""Rows and weights of the gated delta rule, of any sizes."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.kernels.delta.rule import DeltaHeads, DeltaWeights

Rows = tuple[Tensor, Tensor, Tensor]


def rows_of(heads: DeltaHeads, length: int, dtype: torch.dtype, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    channels = 2 * heads.keys * heads.key_dim + heads.values * heads.value_dim
    qkv, b, a = (
        (torch.randn(length, width, generator=generator) * 2).to(dtype)
        for width in (channels, heads.values, heads.values)
    )
    return qkv, b, a


def weights_of(heads: DeltaHeads, dtype: torch.dtype = torch.float32) -> DeltaWeights:
    generator = torch.Generator().manual_seed(9)
    channels = 2 * heads.keys * heads.key_dim + heads.values * heads.value_dim
    conv = torch.randn(channels, 1, 4, generator=generator)
    bias, a_log = (torch.randn(heads.values, generator=generator) for _ in range(2))
    return DeltaWeights(conv.to(dtype), bias.to(dtype), a_log.to(dtype))
