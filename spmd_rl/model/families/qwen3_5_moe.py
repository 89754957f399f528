"""Qwen3.5 to 3.8 with experts: the layers of Qwen3-Next; the text model of a folder."""

from __future__ import annotations

from spmd_rl.model.families.family import Blocks, Family
from spmd_rl.model.families.qwen3_5 import UNUSED
from spmd_rl.model.families.qwen3_next import gated_experts, hybrid_blocks
from spmd_rl.model.families.text_config import PREFIX
from spmd_rl.model.json_fields import MOST_LAYERS, Fields


def _read(config: Fields) -> Blocks:
    moe = gated_experts(config)
    return hybrid_blocks(config, [moe] * config.count("num_hidden_layers", most=MOST_LAYERS))


QWEN3_5_MOE_TEXT = Family("Qwen3_5MoeText", _read, lambda config: UNUSED, is_hybrid=True)
QWEN3_5_MOE = Family("Qwen3_5Moe", _read, lambda config: UNUSED, is_hybrid=True, prefix=PREFIX)
