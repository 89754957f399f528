"""The chunks of a model that one rank has, as modules of Megatron-core with our attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.moe.deep_ep_buffer import check_deep_ep
from spmd_rl.model.families.megatron_layers import options_of
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.megatron.config import KEY, MegatronConfig
from spmd_rl.train.megatron.layer_spec import block_spec

CPU_OPTIONS = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "persist_layer_norm": False,
    "batch_p2p_comm": False,
    "batch_p2p_sync": False,
}


def transformer_config(
    spec: ModelSpec,
    cfg: MegatronConfig,
    axes: Mapping[str, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """Return the `TransformerConfig`. Raises: ConfigError for an option that it lacks."""
    from megatron.core.transformer import TransformerConfig

    check_names("model_options", cfg.model_options, TransformerConfig)
    pp = axes.get("pp", 1)
    ours = {
        **_shape_options(spec),
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": axes.get("tp", 1),
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": cfg.chunks if cfg.chunks > 1 else None,
        "context_parallel_size": axes.get("cp", 1),
        "sequence_parallel": cfg.sequence_parallel,
        "variable_seq_lengths": True,
        "calculate_per_token_loss": True,
        "perform_initialization": False,
        # weight gradients are accumulated by a kernel of apex or transformer-engine
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "moe_token_dispatcher_type": "alltoall",  # the default refuses packed sequences
    }
    if spec.num_experts:
        ours |= _expert_options(axes, cfg)
    elif cfg.layers == "local":
        # LocalActivation takes the place of transformer-engine's activation
        ours |= {"use_te_activation_func": True, "bias_activation_fusion": False}
    on_cpu = CPU_OPTIONS if device.type == "cpu" else {}
    return TransformerConfig(**(ours | on_cpu | cfg.model_options))


def check_names(table: str, options: Mapping[str, Any], of: type) -> None:
    """Raise a ConfigError for an option that one of Megatron-core's configs lacks."""
    known = [entry.name for entry in fields(of)]
    for name in options:
        if name not in known:
            (nearest,) = get_close_matches(name, known, n=1, cutoff=0.0)
            raise ConfigError(
                f"{KEY}.{table}.{name}: Megatron-core's {of.__name__} has no such field; "
                f"the nearest is '{nearest}'"
            )


def _shape_options(spec: ModelSpec) -> dict[str, Any]:
    return options_of(spec.blocks[0]) | {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": spec.rms_eps,
        "activation_func": nn.functional.silu,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


def _expert_options(axes: Mapping[str, int], cfg: MegatronConfig) -> dict[str, Any]:
    """Raises: ConfigError where DeepEP is asked for and cannot run."""
    ways: dict[str, Any] = {}
    if cfg.ep_dispatcher == "deep_ep":
        check_deep_ep(axes.get("ep", 1))
        ways = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}
    return ways | {
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": cfg.layers == "transformer_engine",
        "expert_model_parallel_size": axes.get("ep", 1),
        "expert_tensor_parallel_size": axes.get("etp", 1),
    }


def build_chunks(
    spec: ModelSpec, cfg: MegatronConfig, config: Any, groups: Any, padded_vocab: int
) -> list[Any]:
    """Return this rank's model chunks, whose forward pass gives hidden states.

    Ranks: all of the role.
    """
    from megatron.core.models.gpt import GPTModel

    stage, num_stages = groups.pp.rank(), groups.pp.size()
    found = []
    for number in range(cfg.chunks):
        chunk = number if cfg.chunks > 1 else None
        model = GPTModel(
            config,
            block_spec(spec, cfg, config, groups, chunk),
            vocab_size=padded_vocab,
            max_sequence_length=spec.max_positions,
            pre_process=stage == 0 and number == 0,
            post_process=stage == num_stages - 1 and number == cfg.chunks - 1,
            parallel_output=True,
            share_embeddings_and_output_weights=spec.tie_embeddings,
            position_embedding_type="none",  # LocalAttention turns them
            pg_collection=groups,
            vp_stage=chunk,
        )
        model._postprocess = _hidden_states
        found.append(model)
    return found


def _hidden_states(hidden_states: Tensor, **_: Any) -> Tensor:
    """Take the place of the head: only some rows need logits (scores.py)."""
    return hidden_states
