"""Qwen3: a dense layer whose query and key heads are normed."""

from __future__ import annotations

from spmd_rl.model.families.dense import dense_rules
from spmd_rl.model.families.family import Family
from spmd_rl.model.families.rules import Rule, Whole
from spmd_rl.model.spec import ModelSpec

HEAD_NORMS: dict[str, Rule] = {
    "self_attention.q_layernorm.weight": Whole("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": Whole("self_attn.k_norm.weight"),
}


def _rules(spec: ModelSpec) -> dict[str, Rule]:
    return dense_rules(spec) | HEAD_NORMS


QWEN3 = Family(_rules)
