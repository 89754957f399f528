"""Torch module of grouped-query attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spmd_rl.kernels import QkNorm, Rotary, TokenAttention
from spmd_rl.kernels.attention.token_attention import Reach
from spmd_rl.kernels.rowwise.activation import sigmoid_mul
from spmd_rl.model.fused_projections import FusableLayer, project
from spmd_rl.model.layers.norm_module import RmsNorm
from spmd_rl.model.linear import Linear


class Attention(FusableLayer):
    """Attention of block `number`; the other arguments are the fields of `Gqa`."""

    def __init__(
        self,
        number: int,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rms_eps: float,
        qkv_bias: bool,
        out_bias: bool,
        qk_norm: bool,
        zero_centred: bool,
        gated: bool,
        window: int,
        has_sinks: bool,
    ) -> None:
        super().__init__()
        self.number = number
        self.head_dim = head_dim
        self.eps = rms_eps
        self.gated = gated
        self.window = window
        width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
        self.q_proj = Linear(hidden_size, width * (1 + gated), bias=qkv_bias)
        self.k_proj = Linear(hidden_size, kv_width, bias=qkv_bias)
        self.v_proj = Linear(hidden_size, kv_width, bias=qkv_bias)
        self.o_proj = Linear(width, hidden_size, bias=out_bias)
        self.q_norm = RmsNorm(head_dim, rms_eps, zero_centred) if qk_norm else None
        self.k_norm = RmsNorm(head_dim, rms_eps, zero_centred) if qk_norm else None
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if has_sinks else None

    def fusable(self) -> list[Linear]:
        return [self.q_proj, self.k_proj, self.v_proj]

    def forward(self, x: Tensor, rotary: Rotary, attend: TokenAttention) -> Tensor:
        projected = project(x, self.joined, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (one.unflatten(-1, (-1, self.head_dim)) for one in projected)
        if self.gated:
            q, gate = q[:, ::2], q[:, 1::2]
        norm = QkNorm(None, None, self.eps)
        if self.q_norm is not None and self.k_norm is not None:
            if self.q_norm.zero_centred:
                q, k = self.q_norm(q)[0], self.k_norm(k)[0]
            else:
                norm = QkNorm(self.q_norm.weight, self.k_norm.weight, self.eps)
        reach = Reach(self.window, self.sinks)
        out = attend.rotate_and_attend(self.number, q, k, v, norm, rotary, reach)
        return self.o_proj((sigmoid_mul(out, gate) if self.gated else out).flatten(1))
