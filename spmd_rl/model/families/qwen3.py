"""Qwen3: a dense layer whose query and key heads are normed."""

from __future__ import annotations

from spmd_rl.model.families.attention import equal_blocks, read_attention
from spmd_rl.model.families.family import Blocks, Family
from spmd_rl.model.json_fields import Fields
from spmd_rl.model.layers.gqa import Gqa
from spmd_rl.model.layers.mlp import Mlp


def qwen3_attention(config: Fields) -> Gqa:
    """Read the attention of a Qwen3 model, dense or not."""
    bias = config.flag("attention_bias", False)
    return read_attention(
        config,
        config.count("head_dim", 128),
        default_kv_heads=32,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
    )


def _read(config: Fields) -> Blocks:
    mlp = Mlp(config.count("hidden_size"), config.count("intermediate_size"))
    return equal_blocks(config, qwen3_attention(config), mlp)


QWEN3 = Family("Qwen3", _read)
