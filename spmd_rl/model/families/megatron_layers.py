"""Layers in Megatron-core: the rules of their parameters, and the options that mean their sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spmd_rl.errors import ConfigError
from spmd_rl.model.families.rules import Joined, QkvByGroup, Rule
from spmd_rl.model.layers.block import NORMS, BlockSpec
from spmd_rl.model.layers.gqa import Gqa
from spmd_rl.model.layers.mlp import Mlp
from spmd_rl.model.layers.moe import Moe

_BEFORE_MIXER, _BEFORE_MLP = (f"{norm}.weight" for norm in NORMS)
OTHER_BACKEND = "which Megatron-core is not given here: use trainer.backend.kind = 'fsdp2'"
EXPERT: Mapping[str, Rule] = {
    "linear_fc1.weight": Joined("gate_proj.weight", "up_proj.weight"),
    "linear_fc2.weight": Joined("down_proj.weight"),
}

# points of a dense block (`PointDef.op`) at modules of Megatron-core's local layer
OUTPUT_POINTS = {
    "input_layernorm": ("input_norm",),
    "self_attention.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "self_attention.linear_proj": ("o_proj",),
    "pre_mlp_layernorm": ("post_norm",),
    "mlp.linear_fc1": ("gate_proj", "up_proj"),
    "mlp.linear_fc2": ("down_proj",),
}
INPUT_POINTS = {"mlp.linear_fc2": "act"}


def block_rules(block: BlockSpec) -> dict[str, Rule]:
    """Return the rules of a block, by the name of the parameter within Megatron-core's layer."""
    return _gqa_rules() | (_mlp_rules() if isinstance(block.mlp, Mlp) else _moe_rules())


def _gqa_rules() -> dict[str, Rule]:
    rules: dict[str, Rule] = {
        "input_layernorm.weight": Joined(_BEFORE_MIXER),
        "self_attention.linear_qkv.layer_norm_weight": Joined(_BEFORE_MIXER),
        "self_attention.linear_proj.weight": Joined("self_attn.o_proj.weight"),
        "self_attention.q_layernorm.weight": Joined("self_attn.q_norm.weight"),
        "self_attention.k_layernorm.weight": Joined("self_attn.k_norm.weight"),
    }
    for kind in ("weight", "bias"):
        query, key, value = (f"self_attn.{one}_proj.{kind}" for one in "qkv")
        rules[f"self_attention.linear_qkv.{kind}"] = QkvByGroup(query, key, value)
        # of our own attention
        rules[f"self_attention.qkv_proj.{kind}"] = Joined(query, key, value)
    return rules


def _mlp_rules() -> dict[str, Rule]:
    return {
        "pre_mlp_layernorm.weight": Joined(_BEFORE_MLP),
        "mlp.linear_fc1.layer_norm_weight": Joined(_BEFORE_MLP),
        "mlp.linear_fc1.weight": Joined("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "mlp.linear_fc2.weight": Joined("mlp.down_proj.weight"),
    }


def _moe_rules() -> dict[str, Rule]:
    return {
        "pre_mlp_layernorm.weight": Joined(_BEFORE_MLP),
        "mlp.router.weight": Joined("mlp.gate.weight"),
    }


def options_of(block: BlockSpec) -> dict[str, Any]:
    """Return the fields of `TransformerConfig` that mean the sizes of a block."""
    attention, mlp = block.mixer, block.mlp
    assert isinstance(attention, Gqa)
    options = {
        "num_attention_heads": attention.num_heads,
        "num_query_groups": attention.num_kv_heads,
        "kv_channels": attention.head_dim,
        "qk_layernorm": attention.qk_norm,
        "add_qkv_bias": attention.qkv_bias,
        "add_bias_linear": False,
        "gated_linear_unit": True,
    }
    if isinstance(mlp, Moe):
        return options | {
            "ffn_hidden_size": mlp.expert_size,  # of a dense layer, which there is none of
            "num_moe_experts": mlp.num_experts,
            "moe_ffn_hidden_size": mlp.expert_size,
            "moe_router_topk": mlp.experts_per_token,
            "moe_router_pre_softmax": not mlp.normalizes_weights,
        }
    assert isinstance(mlp, Mlp)
    return options | {"ffn_hidden_size": mlp.intermediate_size}


def require_known(blocks: Sequence[BlockSpec]) -> None:
    """Raises: ConfigError unless Megatron-core can be given these distinct blocks of a model."""
    if len(blocks) > 1:
        raise ConfigError(f"the model's layers differ from each other, {OTHER_BACKEND}")
    mixer, mlp = blocks[0].layers
    if not (isinstance(mixer, Gqa) and isinstance(mlp, Mlp | Moe)):
        kinds = f"{type(mixer).__name__} and {type(mlp).__name__}"
        raise ConfigError(f"the model has layers of the kinds {kinds}, {OTHER_BACKEND}")
    if isinstance(mlp, Moe) and (mlp.sigmoid or mlp.shared_size):
        raise ConfigError(f"the model has shared experts or routers of sigmoids, {OTHER_BACKEND}")
    if mixer.out_bias or (isinstance(mlp, Mlp) and mlp.bias):
        raise ConfigError(
            f"the model has biases outside of its queries, keys and values, {OTHER_BACKEND}"
        )
