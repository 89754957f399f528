"""Torch module of attention to latents."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spmd_rl.kernels import QkNorm, Rotary, TokenAttention
from spmd_rl.kernels.latents.of_heads import linear_of_heads
from spmd_rl.model.layers.norm_module import RmsNorm
from spmd_rl.model.linear import Linear

EPS = 1e-6  # of the norms of latents, whatever the config says of others


class LatentAttention(nn.Module):
    """Attention of block `number`; the other arguments are the fields of `Mla`."""

    def __init__(
        self,
        number: int,
        *,
        hidden_size: int,
        num_heads: int,
        latent_dim: int,
        query_rank: int,
        plain_dim: int,
        rotary_dim: int,
        value_dim: int,
        scale: float,
        interleaved: bool,
        bias: bool,
    ) -> None:
        super().__init__()
        self.number = number
        self.sizes = plain_dim, rotary_dim, latent_dim, value_dim
        self.interleaved = interleaved
        key_dim = latent_dim + rotary_dim
        self.factor = scale * key_dim**0.5  # attention divides by the root of a key's size
        query_width = num_heads * (plain_dim + rotary_dim)
        if query_rank:
            self.q_a_proj = Linear(hidden_size, query_rank, bias=bias)
            self.q_a_layernorm = RmsNorm(query_rank, EPS)
            self.q_b_proj = Linear(query_rank, query_width, bias=False)
        else:
            self.q_proj = Linear(hidden_size, query_width, bias=False)
        self.query_rank = query_rank
        self.kv_a_proj_with_mqa = Linear(hidden_size, key_dim, bias=bias)
        self.kv_a_layernorm = RmsNorm(latent_dim, EPS)
        self.kv_b_proj = Linear(latent_dim, num_heads * (plain_dim + value_dim), bias=False)
        self.o_proj = Linear(num_heads * value_dim, hidden_size, bias=bias)

    def forward(self, x: Tensor, rotary: Rotary, attend: TokenAttention) -> Tensor:
        plain_dim, rotary_dim, latent_dim, value_dim = self.sizes
        queries = self._queries(x).unflatten(-1, (-1, plain_dim + rotary_dim))
        plain, turned = queries.split([plain_dim, rotary_dim], -1)
        latent, turning = self.kv_a_proj_with_mqa(x).split([latent_dim, rotary_dim], -1)
        if self.interleaved:
            turned, turning = _halves(turned), _halves(turning)
        value = self.kv_a_layernorm(latent)[0].unsqueeze(1)
        key = torch.cat([turning.unsqueeze(1), value], -1)
        of_heads = self.kv_b_proj.weight.to(x.dtype).unflatten(0, (-1, plain_dim + value_dim))
        to_keys, to_values = of_heads.split([plain_dim, value_dim], 1)
        absorbed = linear_of_heads(plain, to_keys.transpose(1, 2))
        query = torch.cat([turned, absorbed], -1) * self.factor
        norm = QkNorm(None, None, EPS)
        out = attend.rotate_and_attend(self.number, query, key, value, norm, rotary)
        return self.o_proj(linear_of_heads(out, to_values).flatten(1))

    def _queries(self, x: Tensor) -> Tensor:
        if not self.query_rank:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))[0])


def _halves(x: Tensor) -> Tensor:
    """Lay pairs of neighbours out as two halves, as positions turn them. Shape: [..., R]."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
