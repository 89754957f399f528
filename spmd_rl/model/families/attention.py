"""What the families with grouped-query attention read alike from a config.json."""

from __future__ import annotations

from spmd_rl.errors import ConfigError
from spmd_rl.model.families.family import Blocks
from spmd_rl.model.json_fields import MOST_LAYERS, Fields
from spmd_rl.model.layers.block import BlockSpec
from spmd_rl.model.layers.gqa import Gqa
from spmd_rl.model.layers.layer import LayerSpec
from spmd_rl.model.rope_spec import require_whole_heads


def read_attention(
    config: Fields,
    head_dim: int,
    *,
    default_kv_heads: int,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
    zero_centred: bool = False,
    gated: bool = False,
    has_sinks: bool = False,
) -> Gqa:
    """Read the sizes of attention; what a family decides by itself is given.

    Raises: ConfigError for heads that cannot be rotated, or shared among the key-value heads.
    """
    heads = config.count("num_attention_heads")
    if head_dim % 2:
        raise ConfigError(
            f"{config.where}: head_dim {head_dim} is odd, and rotary positions turn pairs"
        )
    kv_heads = heads
    if config.raw.get("num_key_value_heads", 0) is not None:
        kv_heads = config.count("num_key_value_heads", default_kv_heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{config.where}: num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    return Gqa(
        config.count("hidden_size"),
        heads,
        kv_heads,
        head_dim,
        rms_eps=config.number("rms_norm_eps", 1e-6),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=qk_norm,
        zero_centred=zero_centred,
        gated=gated,
        has_sinks=has_sinks,
    )


def equal_blocks(config: Fields, attention: Gqa, mlp: LayerSpec) -> Blocks:
    """Return as many equal blocks as the config has layers, whose heads are rotated as a whole."""
    require_whole_heads(config)
    block = BlockSpec(attention.hidden_size, attention, mlp)
    return (block,) * config.count("num_hidden_layers", most=MOST_LAYERS), attention.head_dim
