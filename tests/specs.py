"""Specifications of models for tests, from the sizes of all their layers."""

from __future__ import annotations

from dataclasses import replace

from spmd_rl.model.layers.block import BlockSpec
from spmd_rl.model.layers.gqa import Gqa
from spmd_rl.model.layers.layer import CacheSpec
from spmd_rl.model.layers.mlp import Mlp
from spmd_rl.model.layers.moe import Moe
from spmd_rl.model.rope_spec import RopeSpec
from spmd_rl.model.spec import ModelSpec


def dense_spec(
    family: str,
    *,
    vocab: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: tuple[int, int, int],
    positions: int,
    theta: float = 1e4,
    rms_eps: float = 1e-6,
    tie_embeddings: bool = False,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    eos_ids: tuple[int, ...] = (),
    init_std: float = 0.02,
) -> ModelSpec:
    """Equal blocks of attention and a gated MLP. `heads`: of queries, of keys, and their size."""
    attention = Gqa(hidden, *heads, rms_eps, qkv_bias, out_bias, qk_norm)
    block = BlockSpec(hidden, attention, Mlp(hidden, inner, mlp_bias))
    return ModelSpec(
        family=family,
        vocab_size=vocab,
        hidden_size=hidden,
        max_positions=positions,
        rms_eps=rms_eps,
        rope=RopeSpec(heads[2], theta),
        tie_embeddings=tie_embeddings,
        blocks=(block,) * layers,
        eos_ids=eos_ids,
        init_std=init_std,
    )


def with_experts(
    spec: ModelSpec, num_experts: int, experts_per_token: int, expert_size: int
) -> ModelSpec:
    """The model with a mixture of experts in place of each MLP."""
    moe = Moe(spec.hidden_size, num_experts, experts_per_token, expert_size)
    return replace(spec, blocks=tuple(replace(block, mlp=moe) for block in spec.blocks))


def with_layers(spec: ModelSpec, **sizes: float) -> ModelSpec:
    """The model with other sizes of its layers, each of the one that has it."""
    blocks = []
    for block in spec.blocks:
        layers = [
            replace(layer, **{key: size for key, size in sizes.items() if hasattr(layer, key)})
            for layer in block.layers
        ]
        blocks.append(BlockSpec(block.hidden_size, *layers))
    rope = replace(spec.rope, size=sizes.get("head_dim", spec.rope.size))
    return replace(spec, blocks=tuple(blocks), rope=rope)


def attention_of(spec: ModelSpec) -> Gqa:
    """The attention of the first block."""
    attention = spec.blocks[0].mixer
    assert isinstance(attention, Gqa)
    return attention


def mlp_of(spec: ModelSpec) -> Mlp:
    """The MLP of the first block."""
    mlp = spec.blocks[0].mlp
    assert isinstance(mlp, Mlp)
    return mlp


def kv_layers(num_layers: int, num_kv_heads: int, head_dim: int, num_heads: int = 0) -> list:
    """What layers of attention keep in pages."""
    kv = num_kv_heads, head_dim
    return [CacheSpec((kv, kv), max(num_heads, num_kv_heads) // num_kv_heads)] * num_layers
