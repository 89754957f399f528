"""DeepSeek-V3, Moonlight and GLM-4.7-Flash: latents, and the experts of GLM-4.5."""

from __future__ import annotations

from spmd_rl.model.families.family import Blocks, Family
from spmd_rl.model.families.glm4_moe import dense_then_sparse, further_layers
from spmd_rl.model.json_fields import Fields
from spmd_rl.model.layers.mla import Mla
from spmd_rl.model.layers.mlp import Mlp
from spmd_rl.model.rope_spec import yarn_scale

DENSE, SPARSE = "dense", "sparse"


def _read(config: Fields, first_dense: int, plain: int, value: int, rank: int) -> Blocks:
    hidden = config.count("hidden_size")
    plain_dim = config.count("qk_nope_head_dim", plain)
    rotary_dim = config.count("qk_rope_head_dim", 64)
    if rotary_dim % 2:
        raise config.wrong("qk_rope_head_dim", "an even number, as rotary positions turn pairs")
    has_rank = config.raw.get("q_lora_rank", rank) is not None
    attention = Mla(
        hidden,
        config.count("num_attention_heads"),
        config.count("kv_lora_rank", 512),
        config.count("q_lora_rank", rank) if has_rank else 0,
        plain_dim,
        rotary_dim,
        config.count("v_head_dim", value),
        scale=(plain_dim + rotary_dim) ** -0.5 * yarn_scale(config) ** 2,
        interleaved=config.flag("rope_interleave", True),
        bias=config.flag("attention_bias", False),
    )
    blocks = dense_then_sparse(config, attention, first_dense)
    kinds = [DENSE if isinstance(one.mlp, Mlp) else SPARSE for one in blocks]
    if config.raw.get("mlp_layer_types", kinds) != kinds:
        raise config.wrong("mlp_layer_types", f"{kinds}, as first_k_dense_replace has it")
    return blocks, rotary_dim


def _deepseek(config: Fields) -> Blocks:
    return _read(config, 3, 128, 128, 1536)


def _glm_lite(config: Fields) -> Blocks:
    return _read(config, 1, 192, 256, 768)


DEEPSEEK_V3 = Family("DeepseekV3", _deepseek, further_layers)
GLM4_MOE_LITE = Family("Glm4MoeLite", _glm_lite, further_layers)
