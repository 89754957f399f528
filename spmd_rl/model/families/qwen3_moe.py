"""Qwen3-MoE: the attention of Qwen3, a router, and experts that are gated MLPs."""

from __future__ import annotations

from spmd_rl.errors import ConfigError
from spmd_rl.model.families.attention import equal_blocks
from spmd_rl.model.families.family import Blocks, Family
from spmd_rl.model.families.qwen3 import qwen3_attention
from spmd_rl.model.json_fields import MOST_EXPERTS, Fields
from spmd_rl.model.layers.moe import Moe

COUNTS = ("num_experts", "num_local_experts")  # transformers 5 writes the second


def _read(config: Fields) -> Blocks:
    if config.raw.get("decoder_sparse_step", 1) != 1 or config.raw.get("mlp_only_layers"):
        raise ConfigError(
            f"{config.where}: layers without experts beside others with them are not read"
        )
    key = next((key for key in COUNTS if key in config.raw), COUNTS[0])
    num_experts = config.count(key, most=MOST_EXPERTS)
    moe = Moe(
        config.count("hidden_size"),
        num_experts,
        config.count("num_experts_per_tok", most=num_experts),
        config.count("moe_intermediate_size"),
        normalizes_weights=config.flag("norm_topk_prob", False),
    )
    return equal_blocks(config, qwen3_attention(config), moe)


QWEN3_MOE = Family("Qwen3Moe", _read)
