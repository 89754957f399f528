"""Layers of a chunk: Megatron-core's own with our attention and norms, or transformer-engine's."""

from __future__ import annotations

from functools import partial
from typing import Any

from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.megatron.attention import LocalAttention, LocalNorm, TransformerEngineAttention
from spmd_rl.train.megatron.config import MegatronConfig
from spmd_rl.train.megatron.exact import WITHOUT_EFFECT
from spmd_rl.train.megatron.linear import LocalActivation, LocalGateUp, LocalLinear
from spmd_rl.train.megatron.local_layer import local_layer
from spmd_rl.train.megatron.self_attention import LocalSelfAttention


def block_spec(
    spec: ModelSpec, cfg: MegatronConfig, config: Any, stage: int, chunk: int | None
) -> Any:
    """Return the `TransformerBlockSubmodules` of one chunk of a stage.

    `config` is the `TransformerConfig`. `chunk` is None where a stage has one alone.
    """
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    is_local = cfg.layers == "local"
    layer, norm = _local_layer(spec, cfg, config) if is_local else _engine_layer(spec, config)
    count = get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)


def _local_layer(spec: ModelSpec, cfg: MegatronConfig, config: Any) -> tuple[Any, Any]:
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
        _use_contract_ops(layer, cfg, config.tensor_model_parallel_size)
    return layer, LocalNorm


def _use_contract_ops(layer: Any, cfg: MegatronConfig, num_ranks: int) -> None:
    """Replace Megatron-core's ops in the spec of a dense layer. `num_ranks` are those along tp."""
    if _recomputes_no_parts(cfg):
        layer.module = local_layer()
    mlp = _mlp_submodules(layer)
    mlp.activation_func = LocalActivation
    if num_ranks == 1:
        layer.submodules.self_attention.module = LocalSelfAttention
        mlp.linear_fc1, mlp.linear_fc2 = LocalGateUp, LocalLinear


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
