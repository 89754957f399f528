"""Layouts whose log-probs have the native engine's bits: the condition of an equal contract."""

from __future__ import annotations

from collections.abc import Mapping

from spmd_rl.errors import ConfigError
from spmd_rl.model.parts.part import check_parts
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.megatron.config import MegatronConfig

# of Megatron-core's options, those that change when something is computed, and no bit of it
WITHOUT_EFFECT = {
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
}


def has_engine_bits(spec: ModelSpec, axes: Mapping[str, int], cfg: MegatronConfig) -> bool:
    """Return whether a model's log-probs are the native engine's, bit for bit.

    Along tp, sums are the engine's in parts. No other axis cuts a sum of a forward pass.
    """
    has_contract_ops = cfg.layers == "local" and WITHOUT_EFFECT.issuperset(cfg.model_options)
    return has_contract_ops and sums_as_engine(spec, axes.get("tp", 1))


def sums_as_engine(spec: ModelSpec, tp: int) -> bool:
    """Return whether local layers on `tp` ranks that share them sum as ranks of an engine do.

    Mixtures do not, nor do ranks that outnumber key-value heads.
    """
    heads = {cache.arrays[0][0] for block in spec.distinct_blocks() if (cache := block.cache())}
    if spec.num_experts or any(number % tp for number in heads):
        return False
    try:
        check_parts(spec, tp, "tp")
    except ConfigError:
        return False
    return True
