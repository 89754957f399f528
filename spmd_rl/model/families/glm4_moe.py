"""GLM-4.5 to 4.7: dense first layers, experts chosen by sigmoids, and some that every token takes.

A folder has a layer more, which predicts further tokens. It is kept as it is, and not used.
"""

from __future__ import annotations

from spmd_rl.errors import ConfigError
from spmd_rl.model.families.attention import read_attention
from spmd_rl.model.families.family import Blocks, Family
from spmd_rl.model.json_fields import MOST_EXPERTS, MOST_LAYERS, Fields
from spmd_rl.model.layers.block import BlockSpec
from spmd_rl.model.layers.layer import LayerSpec
from spmd_rl.model.layers.mlp import Mlp
from spmd_rl.model.layers.moe import Moe
from spmd_rl.model.layers.sigmoid_router import SigmoidRouter
from spmd_rl.model.rope_spec import rotated_size

ROTATED_SHARE = 0.5  # of a head, where the config says nothing
COUNTS = ("n_routed_experts", "num_local_experts")  # one attribute in transformers
FURTHER = ("num_nextn_predict_layers", "num_mtp_layers")  # one attribute too


def _read(config: Fields) -> Blocks:
    hidden = config.count("hidden_size")
    head_dim = config.count("head_dim", hidden // config.count("num_attention_heads"))
    config.value("rms_norm_eps")  # its default in this family is not that of others
    attention = read_attention(
        config,
        head_dim,
        default_kv_heads=8,
        qkv_bias=config.flag("attention_bias", False),
        qk_norm=config.flag("use_qk_norm", False),
    )
    blocks = dense_then_sparse(config, attention, 1)
    return blocks, rotated_size(config, head_dim, ROTATED_SHARE)


def dense_then_sparse(
    config: Fields, attention: LayerSpec, first_dense: int
) -> tuple[BlockSpec, ...]:
    """Return the blocks: some dense ones, as many as `first_dense` where the config does not say,
    then those with experts.
    """
    hidden = config.count("hidden_size")
    num_layers = config.count("num_hidden_layers", most=MOST_LAYERS)
    num_dense = min(config.count("first_k_dense_replace", first_dense, least=0), num_layers)
    dense = BlockSpec(hidden, attention, Mlp(hidden, config.count("intermediate_size")))
    sparse = BlockSpec(hidden, attention, read_experts(config))
    return (dense,) * num_dense + (sparse,) * (num_layers - num_dense)


def read_experts(config: Fields) -> Moe:
    """Read the experts. Raises: ConfigError for groups that the router cannot choose from."""
    size = config.count("moe_intermediate_size")
    moe = Moe(
        config.count("hidden_size"),
        config.count(
            next((key for key in COUNTS if key in config.raw), COUNTS[0]), most=MOST_EXPERTS
        ),
        config.count("num_experts_per_tok"),
        size,
        normalizes_weights=config.flag("norm_topk_prob", True),
        shared_size=size * config.count("n_shared_experts", 1),
        sigmoid=SigmoidRouter(
            config.count("n_group", 1),
            config.count("topk_group", 1),
            config.number("routed_scaling_factor", 1.0),
        ),
    )
    assert moe.sigmoid is not None
    groups, chosen = moe.sigmoid.num_groups, moe.sigmoid.num_chosen_groups
    in_group, rest = divmod(moe.num_experts, groups)
    if rest or in_group < 2 or chosen > groups or moe.experts_per_token > chosen * in_group:
        raise ConfigError(
            f"{config.where}: num_experts_per_tok {moe.experts_per_token} of topk_group {chosen} "
            f"of n_group {groups} equal groups, of two experts or more, cannot be chosen from "
            f"{moe.num_experts} experts"
        )
    return moe


def further_layers(config: Fields) -> tuple[str, ...]:
    """Return how the names of the tensors begin that predict further tokens."""
    key = next((key for key in FURTHER if key in config.raw), FURTHER[0])
    count = config.count(key, 1, least=0, most=MOST_LAYERS)
    first = config.count("num_hidden_layers", most=MOST_LAYERS)
    return tuple(f"model.layers.{number}." for number in range(first, first + count))


GLM4_MOE = Family("Glm4Moe", _read, further_layers)
