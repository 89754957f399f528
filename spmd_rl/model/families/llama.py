"""Llama 3: a dense layer, whose linear layers may have biases."""

from __future__ import annotations

from spmd_rl.errors import ConfigError
from spmd_rl.model.families.attention import equal_blocks, read_attention
from spmd_rl.model.families.family import Blocks, Family
from spmd_rl.model.json_fields import Fields
from spmd_rl.model.layers.mlp import Mlp


def _read(config: Fields) -> Blocks:
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if config.raw.get("sliding_window") is not None:
        raise ConfigError(
            f"{config.where}: sliding_window is set, and sliding-window attention is not supported"
        )
    if hidden % heads:
        raise ConfigError(
            f"{config.where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}"
        )
    of_hidden = hidden // heads
    has_own = config.raw.get("head_dim") is not None
    bias = config.flag("attention_bias", False)
    attention = read_attention(
        config,
        config.count("head_dim") if has_own else of_hidden,
        default_kv_heads=heads,
        qkv_bias=bias,
        out_bias=bias,
    )
    mlp = Mlp(hidden, config.count("intermediate_size"), config.flag("mlp_bias", False))
    return equal_blocks(config, attention, mlp)


LLAMA = Family("Llama", _read)
