"""gpt-oss: attention with sinks, every other layer in a window, and experts with biases."""

from __future__ import annotations

from dataclasses import replace

from spmd_rl.errors import ConfigError
from spmd_rl.model.families.attention import read_attention
from spmd_rl.model.families.family import Blocks, Family
from spmd_rl.model.families.folder_layout import INTERLEAVED
from spmd_rl.model.json_fields import MOST_EXPERTS, MOST_LAYERS, Fields
from spmd_rl.model.layers.block import BlockSpec
from spmd_rl.model.layers.gqa import Gqa
from spmd_rl.model.layers.moe import Moe
from spmd_rl.model.rope_spec import SPELLINGS, require_whole_heads

WINDOW, WHOLE = "sliding_attention", "full_attention"
LIMIT = 7.0  # of what experts multiply, which transformers has in its code


def _read(config: Fields) -> Blocks:
    require_whole_heads(config)
    if not any(config.raw.get(key) for key in SPELLINGS):
        raise ConfigError(f"{config.where}: rope_scaling is missing, which this family has")
    if config.number("swiglu_limit", LIMIT) != LIMIT:
        raise config.wrong("swiglu_limit", f"{LIMIT:g}, as transformers has it")
    attention, experts = _attention(config), _experts(config)
    in_window = replace(attention, window=config.count("sliding_window", 128))
    blocks = {
        kind: BlockSpec(one.hidden_size, one, experts)
        for kind, one in ((WHOLE, attention), (WINDOW, in_window))
    }
    return tuple(blocks[kind] for kind in _kinds(config)), attention.head_dim


def _attention(config: Fields) -> Gqa:
    config.value("rms_norm_eps")  # its default in this family is not that of others
    bias, head_dim = config.flag("attention_bias", True), config.count("head_dim", 64)
    return read_attention(
        config, head_dim, default_kv_heads=8, qkv_bias=bias, out_bias=bias, has_sinks=True
    )


def _kinds(config: Fields) -> list[str]:
    """Return what each layer sees; without a word, every other one is in a window."""
    num_layers = config.count("num_hidden_layers", most=MOST_LAYERS)
    usual = [WHOLE if number % 2 else WINDOW for number in range(num_layers)]
    kinds = config.raw.get("layer_types") or usual
    is_list = isinstance(kinds, list) and len(kinds) == num_layers
    if not is_list or any(one not in (WHOLE, WINDOW) for one in kinds):
        raise config.wrong("layer_types", f"{WINDOW!r} or {WHOLE!r} for each of the layers")
    return kinds


def _experts(config: Fields) -> Moe:
    """A softmax over the chosen experts' logits is one over all, made to add up to one."""
    num_experts = config.count("num_local_experts", 128, most=MOST_EXPERTS)
    return Moe(
        config.count("hidden_size"),
        num_experts,
        config.count("num_experts_per_tok", 4, most=num_experts),
        config.count("intermediate_size"),
        normalizes_weights=True,
        biases=True,
        limit=LIMIT,
    )


GPT_OSS = Family("GptOss", _read, is_hybrid=True, layout=INTERLEAVED)
