"""Qwen3-Next: gated delta layers, every fourth with gated attention instead, and experts."""

from __future__ import annotations

from spmd_rl.model.families.attention import read_attention
from spmd_rl.model.families.family import Blocks, Family
from spmd_rl.model.json_fields import MOST_EXPERTS, MOST_LAYERS, Fields
from spmd_rl.model.layers.block import BlockSpec
from spmd_rl.model.layers.delta import GatedDelta
from spmd_rl.model.layers.gqa import Gqa
from spmd_rl.model.layers.layer import LayerSpec
from spmd_rl.model.layers.mlp import Mlp
from spmd_rl.model.layers.moe import Moe
from spmd_rl.model.rope_spec import rotated_size

LINEAR, FULL = "linear_attention", "full_attention"
ROTATED_SHARE = 0.25  # of a head, where the config says nothing
FURTHER = ("mtp.",)  # how the names of tensors begin that predict further tokens
EXPERTS = "num_experts"
COUNTS = (EXPERTS, "num_local_experts")  # transformers 5 writes the second


def hybrid_blocks(config: Fields, mlps: list[LayerSpec], fused: bool = False) -> Blocks:
    """Return a block for each of `mlps`, with the mixer that the config says."""
    hidden, head_dim = config.count("hidden_size"), config.count("head_dim", 256)
    attention = _attention(config, head_dim)
    delta = _delta(config, fused)
    kinds = _layer_types(config, len(mlps))
    blocks = tuple(
        BlockSpec(hidden, attention if kind == FULL else delta, mlp, zero_centred=True)
        for kind, mlp in zip(kinds, mlps, strict=True)
    )
    return blocks, rotated_size(config, head_dim, ROTATED_SHARE)


def _attention(config: Fields, head_dim: int) -> Gqa:
    bias = config.flag("attention_bias", False)
    return read_attention(
        config,
        head_dim,
        default_kv_heads=2,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        zero_centred=True,
        gated=True,
    )


def _delta(config: Fields, fused: bool) -> GatedDelta:
    """Read the sizes of delta layers. Raises: ConfigError for key heads with unequal shares."""
    keys = config.count("linear_num_key_heads", 16)
    values = config.count("linear_num_value_heads", 32)
    if values % keys:
        raise config.wrong("linear_num_value_heads", f"a multiple of linear_num_key_heads {keys}")
    return GatedDelta(
        config.count("hidden_size"),
        keys,
        values,
        config.count("linear_key_head_dim", 128),
        config.count("linear_value_head_dim", 128),
        config.count("linear_conv_kernel_dim", 4),
        config.number("rms_norm_eps", 1e-6),
        fused,
    )


def _layer_types(config: Fields, num_layers: int) -> list[str]:
    """Return the kind of each layer's mixer. Raises: ConfigError for kinds that are not known."""
    kinds = config.raw.get("layer_types")
    if kinds is None:
        interval = config.count("full_attention_interval", 4)
        return [LINEAR if (one + 1) % interval else FULL for one in range(num_layers)]
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in (LINEAR, FULL) for kind in kinds)
    ):
        raise config.wrong("layer_types", f"{LINEAR!r} or {FULL!r} for each of the layers")
    return kinds


def gated_experts(config: Fields) -> Moe:
    """Read the experts, and the MLP with a gate that every token takes."""
    key = next((key for key in COUNTS if key in config.raw), EXPERTS)
    num_experts = config.count(key, most=MOST_EXPERTS)
    return Moe(
        config.count("hidden_size"),
        num_experts,
        config.count("num_experts_per_tok", most=num_experts),
        config.count("moe_intermediate_size"),
        normalizes_weights=config.flag("norm_topk_prob", True),
        shared_size=config.count("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def _read(config: Fields) -> Blocks:
    num_layers = config.count("num_hidden_layers", most=MOST_LAYERS)
    step = config.count("decoder_sparse_step", 1)
    dense = config.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise config.wrong("mlp_only_layers", "a list of numbers of layers")
    key = next((key for key in COUNTS if key in config.raw), EXPERTS)
    has_experts = config.count(key, least=0, most=MOST_EXPERTS) > 0
    sparse = [
        has_experts and number not in dense and (number + 1) % step == 0
        for number in range(num_layers)
    ]
    of_experts = gated_experts(config) if any(sparse) else None
    mlps: list[LayerSpec] = [
        of_experts
        if of_experts and is_sparse
        else Mlp(config.count("hidden_size"), config.count("intermediate_size"))
        for is_sparse in sparse
    ]
    return hybrid_blocks(config, mlps, fused=True)


QWEN3_NEXT = Family("Qwen3Next", _read, lambda config: FURTHER, is_hybrid=True)
