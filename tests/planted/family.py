"""A planted family: a dense first layer, and layers of routed and shared experts after it."""

from __future__ import annotations

from spmd_rl.model.families import FAMILIES
from spmd_rl.model.families.family import Blocks, Family
from spmd_rl.model.families.qwen3 import qwen3_attention
from spmd_rl.model.json_fields import Fields
from spmd_rl.model.layers.block import BlockSpec
from spmd_rl.model.layers.mlp import Mlp
from tests.planted.shared_moe import SharedMoe

CONFIG = {
    "model_type": "planted_moe",
    "architectures": ["PlantedForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 36,
    "intermediate_size": 54,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 160,
    "rope_theta": 10000.0,
    "initializer_range": 0.2,
    "eos_token_id": 1,
}


def _read(config: Fields) -> Blocks:
    hidden, attention = config.count("hidden_size"), qwen3_attention(config)
    experts = SharedMoe(
        hidden,
        config.count("num_experts"),
        config.count("num_experts_per_tok"),
        config.count("moe_intermediate_size"),
        config.count("shared_expert_intermediate_size"),
    )
    dense = BlockSpec(hidden, attention, Mlp(hidden, config.count("intermediate_size")))
    rest = (BlockSpec(hidden, attention, experts),) * (config.count("num_hidden_layers") - 1)
    return (dense, *rest), attention.head_dim


PLANTED = Family("Planted", _read)


def plant() -> None:
    """Make the family known in this process: the one edit that a family needs elsewhere."""
    FAMILIES["planted_moe"] = PLANTED
