"""Qwen3.5 to 3.8, dense and with experts: the layers of Qwen3-Next; the text model of a folder."""

from __future__ import annotations

from collections.abc import Callable

from spmd_rl.model.families.family import Blocks, Family
from spmd_rl.model.families.qwen3_next import FURTHER, gated_experts, hybrid_blocks
from spmd_rl.model.families.text_config import PREFIX, VISION
from spmd_rl.model.json_fields import MOST_LAYERS, Fields
from spmd_rl.model.layers.layer import LayerSpec
from spmd_rl.model.layers.mlp import Mlp

UNUSED = (*VISION, *FURTHER)


def _read(config: Fields) -> Blocks:
    return _blocks(config, Mlp(config.count("hidden_size"), config.count("intermediate_size")))


def _read_mixture(config: Fields) -> Blocks:
    return _blocks(config, gated_experts(config))


def _blocks(config: Fields, mlp: LayerSpec) -> Blocks:
    return hybrid_blocks(config, [mlp] * config.count("num_hidden_layers", most=MOST_LAYERS))


def _family(name: str, read: Callable[[Fields], Blocks], prefix: str = "") -> Family:
    return Family(name, read, lambda config: UNUSED, is_hybrid=True, prefix=prefix)


QWEN3_5 = _family("Qwen3_5", _read, PREFIX)
QWEN3_5_TEXT = _family("Qwen3_5Text", _read)
QWEN3_5_MOE = _family("Qwen3_5Moe", _read_mixture, PREFIX)
QWEN3_5_MOE_TEXT = _family("Qwen3_5MoeText", _read_mixture)
