"""Layouts whose log-probs have the native engine's bits: the condition of an equal contract."""

from __future__ import annotations

from collections.abc import Mapping

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

    Along tp the sums of products are cut, and along cp attention is torch's. A pipeline and the
    axes of the data cut no sum of a forward pass.
    """
    is_cut = axes.get("tp", 1) > 1 or axes.get("cp", 1) > 1
    is_dense = spec.num_experts == 0
    has_contract_ops = cfg.layers == "local" and WITHOUT_EFFECT.issuperset(cfg.model_options)
    return is_dense and not is_cut and has_contract_ops
