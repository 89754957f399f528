"""Rules of a layer that all dense families share: attention by groups and a gated MLP."""

from __future__ import annotations

from spmd_rl.model.families.rules import Columns, GateUp, QkvByGroup, Rule, Whole
from spmd_rl.model.spec import ModelSpec


def attention_rules(spec: ModelSpec) -> dict[str, Rule]:
    """Return the rules of attention and of the norm before it."""
    rules: dict[str, Rule] = {
        "input_layernorm.weight": Whole("input_layernorm.weight"),
        "self_attention.linear_qkv.layer_norm_weight": Whole("input_layernorm.weight"),
        "self_attention.linear_proj.weight": Columns("self_attn.o_proj.weight"),
    }
    for kind in ("weight", "bias"):
        query, key, value = (f"self_attn.{one}_proj.{kind}" for one in "qkv")
        fused = QkvByGroup(query, key, value, spec.num_kv_heads)
        rules[f"self_attention.linear_qkv.{kind}"] = fused
        # of our own attention, which no tp cuts
        rules[f"self_attention.qkv_proj.{kind}"] = QkvByGroup(query, key, value, num_groups=1)
    return rules


def mlp_rules(spec: ModelSpec) -> dict[str, Rule]:
    """Return the rules of the MLP and of the norm before it."""
    return {
        "pre_mlp_layernorm.weight": Whole("post_attention_layernorm.weight"),
        "mlp.linear_fc1.layer_norm_weight": Whole("post_attention_layernorm.weight"),
        "mlp.linear_fc1.weight": GateUp("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "mlp.linear_fc2.weight": Columns("mlp.down_proj.weight"),
    }


def dense_rules(spec: ModelSpec) -> dict[str, Rule]:
    """Return the rules of a whole layer."""
    return attention_rules(spec) | mlp_rules(spec)
