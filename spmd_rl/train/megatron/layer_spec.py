"""Layers of a chunk: Megatron-core's own with our attention and norms, or transformer-engine's."""

from __future__ import annotations

from typing import Any

from spmd_rl.model.moe_spec import MoeSpec
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.megatron.attention import LocalAttention, LocalNorm, TransformerEngineAttention
from spmd_rl.train.megatron.config import MegatronConfig
from spmd_rl.train.megatron.linear import use_contract_ops


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
    layer, norm = _local_layer(spec, config) if is_local else _engine_layer(spec, config)
    count = get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)


def _local_layer(spec: ModelSpec, config: Any) -> tuple[Any, Any]:
    """Return the spec of a local layer, and the norm after the last one."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=spec.qk_norm, normalization="RMSNorm"
    )
    attention = layer.submodules.self_attention.submodules
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = LocalNorm
    attention.core_attention = LocalAttention
    if spec.qk_norm:
        attention.q_layernorm = attention.k_layernorm = LocalNorm
    if not isinstance(spec, MoeSpec):
        use_contract_ops(layer, spec, config.tensor_model_parallel_size)
    return layer, LocalNorm


def _engine_layer(spec: ModelSpec, config: Any) -> tuple[Any, Any]:
    """Return the spec of a layer of transformer-engine, and the norm after the last one.

    A norm and the linear layer after it are one module, and all experts of a rank are another.
    """
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=spec.qk_norm,
    )
    layer.submodules.self_attention.submodules.core_attention = TransformerEngineAttention
    return layer, TENorm
