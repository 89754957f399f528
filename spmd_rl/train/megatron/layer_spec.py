"""Layers of a chunk: Megatron-core's own with our attention and norms, or transformer-engine's."""

from __future__ import annotations

from functools import partial
from typing import Any

from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.megatron.attention import LocalAttention, LocalNorm, TransformerEngineAttention
from spmd_rl.train.megatron.config import MegatronConfig
from spmd_rl.train.megatron.exact import WITHOUT_EFFECT, sums_as_engine
from spmd_rl.train.megatron.linear import LocalActivation, LocalGateUp, LocalOutput
from spmd_rl.train.megatron.local_layer import local_layer
from spmd_rl.train.megatron.self_attention import LocalSelfAttention
from spmd_rl.train.megatron.tensor_ranks import TensorRanks


def block_spec(
    spec: ModelSpec, cfg: MegatronConfig, config: Any, groups: Any, chunk: int | None
) -> Any:
    """Return the `TransformerBlockSubmodules` of one chunk of this rank's stage.

    `config` is the `TransformerConfig`. `chunk` is None where a stage has one alone.
    """
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    is_local = cfg.layers == "local"
    ranks = TensorRanks(groups.tp, spec.row_shards, cfg.sequence_parallel)
    layer, norm = (
        _local_layer(spec, cfg, config, ranks) if is_local else _engine_layer(spec, config)
    )
    count = get_num_layers_to_build(config, vp_stage=chunk, pp_rank=groups.pp.rank())
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)


def _local_layer(
    spec: ModelSpec, cfg: MegatronConfig, config: Any, ranks: TensorRanks
) -> tuple[Any, Any]:
    """Return the spec of a local layer, and the norm after the last one."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    attention = layer.submodules.self_attention.submodules
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = LocalNorm
    attention.core_attention = LocalAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = LocalNorm
    if not spec.num_experts:
        _use_contract_ops(layer, cfg)
    if sums_as_engine(spec, ranks.count):
        _use_contract_sums(layer, ranks)
    return layer, LocalNorm


def _use_contract_ops(layer: Any, cfg: MegatronConfig) -> None:
    """Replace Megatron-core's layer and activation in the spec of a dense layer."""
    if _recomputes_no_parts(cfg):
        layer.module = local_layer()
    _mlp_submodules(layer).activation_func = LocalActivation


def _use_contract_sums(layer: Any, ranks: TensorRanks) -> None:
    """Replace Megatron-core's attention and linear layers in the spec of a dense layer."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    params, mlp = {"ranks": ranks}, _mlp_submodules(layer)
    layer.submodules.self_attention = ModuleSpec(LocalSelfAttention, params)
    mlp.linear_fc1 = ModuleSpec(LocalGateUp, params)
    mlp.linear_fc2 = ModuleSpec(LocalOutput, params)


def _recomputes_no_parts(cfg: MegatronConfig) -> bool:
    """Return whether no option asks for what Megatron-core's own layer alone can do."""
    options = cfg.model_options
    return (
        WITHOUT_EFFECT.issuperset(options) and options.get("recompute_granularity") != "selective"
    )


def _mlp_submodules(layer: Any) -> Any:
    """Return the `MLPSubmodules` of a layer's spec, which later versions make by a function."""
    mlp = layer.submodules.mlp
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules


def _engine_layer(spec: ModelSpec, config: Any) -> tuple[Any, Any]:
    """Return the spec of a layer of transformer-engine, and the norm after the last one.

    A norm and the linear layer after it are one module, and all experts of a rank are another.
    """
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
    )
    layer.submodules.self_attention.submodules.core_attention = TransformerEngineAttention
    return layer, TENorm
