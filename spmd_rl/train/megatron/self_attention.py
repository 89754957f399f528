"""Self-attention of the local layer spec: one product, then one op that norms and rotates.

Megatron-core lays out queries, keys and values by group. Then they are copied before each op, and
so are their gradients. Here each of them is a range of columns, which the op that norms and rotates
reads as it is. A rank along tp has the queries of some keys, and no other rank has these keys.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spmd_rl.kernels import QkNorm
from spmd_rl.train.megatron.attention import LocalAttention, LocalNorm
from spmd_rl.train.megatron.linear import LocalOutput, LocalProjections
from spmd_rl.train.megatron.tensor_ranks import TensorRanks


class LocalSelfAttention(nn.Module):
    """Self-attention of one layer, with the arguments of Megatron-core's own module."""

    def __init__(self, config: Any, layer_number: int, ranks: TensorRanks, **_: Any) -> None:
        super().__init__()
        self.head_size, self.eps = config.kv_channels, config.layernorm_epsilon
        width = config.num_attention_heads * self.head_size
        kv_width = config.num_query_groups * self.head_size
        widths = (width, kv_width, kv_width)
        self.qkv_proj = LocalProjections(
            config.hidden_size,
            sum(widths),
            config=config,
            bias=config.add_qkv_bias,
            ranks=ranks,
            widths=widths,
        )
        self.q_layernorm, self.k_layernorm = (
            LocalNorm(config, self.head_size) if config.qk_layernorm else None for _ in "qk"
        )
        self.core_attention = LocalAttention(config, layer_number)
        self.linear_proj = LocalOutput(width, config.hidden_size, config=config, ranks=ranks)
        self.recomputes = (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )

    def forward(
        self, hidden: Tensor, *_: Any, packed_seq_params: Any, **__: Any
    ) -> tuple[Tensor, None]:
        """Shape: hidden [T, 1, C]; returns as much, and no bias that is still to add."""
        joint, _ = self.qkv_proj(hidden)
        q, k, v = (
            one.unflatten(1, (-1, self.head_size))
            for one in self.qkv_proj.split(joint.flatten(0, 1))
        )
        norm = QkNorm(_weight(self.q_layernorm), _weight(self.k_layernorm), self.eps)
        attend = partial(self.core_attention, packed_seq_params=packed_seq_params, norm=norm)
        if self.recomputes:
            out = checkpoint(attend, q, k, v, use_reentrant=False)
        else:
            out = attend(q, k, v)
        found: tuple[Tensor, None] = self.linear_proj(out.unsqueeze(1))
        return found


def _weight(norm: LocalNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight
