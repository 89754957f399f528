"""Qwen2.5: a dense layer whose queries, keys and values have a bias."""

from __future__ import annotations

from spmd_rl.model.families.attention import equal_blocks, read_attention
from spmd_rl.model.families.family import Blocks, Family
from spmd_rl.model.json_fields import Fields
from spmd_rl.model.layers.mlp import Mlp


def _read(config: Fields) -> Blocks:
    hidden = config.count("hidden_size")
    of_hidden = hidden // config.count("num_attention_heads")
    head_dim = config.count("head_dim", of_hidden)
    attention = read_attention(config, head_dim, default_kv_heads=32, qkv_bias=True)
    return equal_blocks(config, attention, Mlp(hidden, config.count("intermediate_size")))


QWEN2 = Family("Qwen2", _read)
