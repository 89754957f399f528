"""Qwen3-MoE: the attention of Qwen3, a router, and experts that are gated MLPs."""

from __future__ import annotations

from dataclasses import replace

from spmd_rl.model.families.attention import equal_blocks
from spmd_rl.model.families.family import Blocks, Family
from spmd_rl.model.families.qwen3 import qwen3_attention
from spmd_rl.model.json_fields import MOST_EXPERTS, Fields
from spmd_rl.model.layers.mlp import Mlp
from spmd_rl.model.layers.moe import Moe

COUNTS = ("num_experts", "num_local_experts")  # transformers 5 writes the second


def _read(config: Fields) -> Blocks:
    experts = _experts(config)
    blocks, rotated = equal_blocks(config, qwen3_attention(config), experts)
    are_dense = _dense_layers(config, len(blocks))
    if any(are_dense):
        mlp = Mlp(experts.hidden_size, config.count("intermediate_size"))
        of_kinds = blocks[0], replace(blocks[0], mlp=mlp)
        blocks = tuple(of_kinds[is_dense] for is_dense in are_dense)
    return blocks, rotated


def _experts(config: Fields) -> Moe:
    key = next((key for key in COUNTS if key in config.raw), COUNTS[0])
    num_experts = config.count(key, most=MOST_EXPERTS)
    return Moe(
        config.count("hidden_size"),
        num_experts,
        config.count("num_experts_per_tok", most=num_experts),
        config.count("moe_intermediate_size"),
        normalizes_weights=config.flag("norm_topk_prob", False),
    )


def _dense_layers(config: Fields, num_layers: int) -> list[bool]:
    """Return of each layer whether it has an MLP in place of experts."""
    step, named = config.count("decoder_sparse_step", 1), config.raw.get("mlp_only_layers") or []
    if not isinstance(named, list) or any(one not in range(num_layers) for one in named):
        raise config.wrong("mlp_only_layers", "a list of numbers of layers")
    return [number in named or (number + 1) % step > 0 for number in range(num_layers)]


QWEN3_MOE = Family("Qwen3Moe", _read)
