"""Qwen3-MoE: the attention of Qwen3, a router, and experts that are gated MLPs."""

from __future__ import annotations

from spmd_rl.model.families.dense import attention_rules
from spmd_rl.model.families.family import Family
from spmd_rl.model.families.qwen3 import HEAD_NORMS
from spmd_rl.model.families.rules import Columns, GateUp, Rule, Whole
from spmd_rl.model.spec import ModelSpec

EXPERT: dict[str, Rule] = {
    "linear_fc1.weight": GateUp("gate_proj.weight", "up_proj.weight"),
    "linear_fc2.weight": Columns("down_proj.weight"),
}


def _rules(spec: ModelSpec) -> dict[str, Rule]:
    return (
        attention_rules(spec)
        | HEAD_NORMS
        | {
            "pre_mlp_layernorm.weight": Whole("post_attention_layernorm.weight"),
            "mlp.router.weight": Whole("mlp.gate.weight"),
        }
    )


QWEN3_MOE = Family(_rules, EXPERT)
