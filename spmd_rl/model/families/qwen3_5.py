"""Qwen3.5 to 3.8 without experts: the mixers of Qwen3-Next; the text model of a folder."""

from __future__ import annotations

from spmd_rl.model.families.family import Blocks, Family
from spmd_rl.model.families.qwen3_next import FURTHER, hybrid_blocks
from spmd_rl.model.families.text_config import PREFIX, VISION
from spmd_rl.model.json_fields import MOST_LAYERS, Fields
from spmd_rl.model.layers.mlp import Mlp

UNUSED = (*VISION, *FURTHER)


def _read(config: Fields) -> Blocks:
    mlp = Mlp(config.count("hidden_size"), config.count("intermediate_size"))
    return hybrid_blocks(config, [mlp] * config.count("num_hidden_layers", most=MOST_LAYERS))


QWEN3_5_TEXT = Family("Qwen3_5Text", _read, lambda config: UNUSED, is_hybrid=True)
QWEN3_5 = Family("Qwen3_5", _read, lambda config: UNUSED, is_hybrid=True, prefix=PREFIX)
