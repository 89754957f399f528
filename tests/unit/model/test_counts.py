"""Parameters and operations of every family, against transformers' own networks and by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.model.families import FAMILIES
from spmd_rl.model.layers.sigmoid_router import CORRECTION
from spmd_rl.model.read import read_spec
from spmd_rl.offload.ledger import TagBytes
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.cost.flops import train_flops
from spmd_rl.train.kinds import kind_of
from spmd_rl.train.megatron.config import MegatronConfig
from tests.backends import megatron_case
from tests.specs import dense_spec, with_experts
from tests.unit.model import hybrids, test_gpt_oss, test_latents

GLM = {
    "model_type": "glm4_moe",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "attention_bias": True,
    "use_qk_norm": True,
}
LATENTS = test_latents.BASE | {"n_group": 1, "topk_group": 1}
CONFIGS = {
    **megatron_case.FAMILIES,
    "glm4_moe": GLM,
    "deepseek_v3": LATENTS,
    "kimi_k2": LATENTS,  # which transformers knows by this name alone
    "gpt_oss": test_gpt_oss.BASE,
    "glm4_moe_lite": LATENTS | test_latents.CONFIGS["as GLM-4.7-Flash"],
    **hybrids.CONFIGS,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    config = megatron_case.SIZES | CONFIGS[family]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    fixed = sum(one.numel() for name, one in theirs.named_buffers() if name.endswith(CORRECTION))
    named = {name: one.numel() for name, one in theirs.named_parameters() if "visual" not in name}
    assert spec.num_parameters == sum(named.values()) + fixed
    assert sum(prod(spec.parameter_shapes()[name]) for name in spec.fixed_names()) == fixed
    assert spec.parameter_shapes() == {one.name: one.shape for one in spec.parameters()}
    assert spec.num_parameters == sum(map(prod, spec.parameter_shapes().values()))
    assert spec.num_parameters == sum(block.cost().parameters for block in spec.blocks) + sum(
        one.num_elements for one in spec.outer_parameters()
    )


def _master(memory: Sequence[TagBytes]) -> int:
    return next(one.num_bytes for one in memory if one.tag == "master")


@pytest.mark.parametrize("family", sorted(megatron_case.FAMILIES))
def test_the_plan_counts_them(family: str, tmp_path: Path) -> None:
    config = megatron_case.SIZES | megatron_case.FAMILIES[family]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec, placement = read_spec(tmp_path), plan_split({"train": RoleSplit()}, 1).train
    cfg = TrainerConfig(dtype="float32", backend=MegatronConfig())
    # float32 weights, and the buffer of their gradients
    assert _master(kind_of(cfg).memory(spec, cfg, placement, "lm")) == 8 * spec.num_parameters
    if not spec.num_experts:
        cfg = TrainerConfig()
        found = kind_of(cfg).memory(spec, cfg, placement, "lm")
        assert _master(found) == 4 * spec.num_parameters


# as published: hidden size, layers, experts, of these a token's, rows of one
MIXTURES = {
    "Qwen3-30B-A3B": (2048, 48, 128, 8, 768, 30.5e9, 3.35e9),
    "four experts a token": (2048, 48, 128, 4, 768, 30.5e9, None),
    "experts of 512": (2048, 48, 128, 8, 512, None, None),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_operations_of_a_mixture_are_those_of_its_active_weights(name: str) -> None:
    hidden, layers, experts, each, rows, total, active = MIXTURES[name]
    dense = dense_spec(
        "qwen3_moe",
        vocab=151936,
        hidden=hidden,
        inner=6144,
        layers=layers,
        heads=(32, 4, 128),
        positions=40960,
        theta=1e6,
        qk_norm=True,
    )
    spec = with_experts(dense, experts, each, rows)
    if total:
        assert spec.num_parameters == pytest.approx(total, rel=0.01)
    attention = hidden * 128 * (32 + 4 + 4 + 32)
    by_token = layers * (attention + hidden * experts + each * 3 * hidden * rows)
    if active:  # the embedding and the head beside what is multiplied in the layers
        assert by_token + 2 * 151936 * hidden == pytest.approx(active, rel=0.01)
    lengths = np.array([1000, 3000], np.int32)
    pairs = layers * 12 * 128 * 32 * sum(int(length) ** 2 / 2 for length in lengths)
    by_hand = 6 * (by_token * 4000 + 151936 * hidden * 2500) + pairs
    assert train_flops(spec, lengths, 2500) == pytest.approx(by_hand, rel=0.01)
