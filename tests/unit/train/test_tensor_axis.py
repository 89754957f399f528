"""The axis tp of FSDP2 before a run: what it does not go with is named, and what it saves."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch

from spmd_rl.errors import ConfigError
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.model.lora import LoraConfig
from spmd_rl.model.network import CausalLM
from spmd_rl.model.parts.part import ModelPart
from spmd_rl.train.config import Fsdp2Config, OptimizerConfig, TrainerConfig
from spmd_rl.train.cost.memory import step_sizes
from spmd_rl.train.cost.parts import of_layers, own_shapes
from spmd_rl.train.fsdp2.axes import check_axes
from tests.specs import dense_spec, with_experts

DENSE = dense_spec("qwen3", vocab=93, hidden=32, inner=24, layers=2, heads=(8, 4, 8), positions=64)


def check(cfg: TrainerConfig, spec: Any = DENSE, world: int = 4, **axes: int) -> None:
    check_axes(cfg, plan_split({"train": RoleSplit(**axes)}, world).train, spec)


def test_matrices_are_shared_beside_shards_and_copies() -> None:
    for axes in ({"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}, {"cp": 2, "tp": 2}):
        check(TrainerConfig(), **axes)
    check(TrainerConfig(), None, tp=4)
    for ep in (1, 2, 4):
        check(TrainerConfig(), with_experts(DENSE, 8, 2, 20), tp=2, ep=ep)
    check(TrainerConfig(deterministic=True, data_parts=2), tp=2)


def test_a_mixture_is_not_one_unit() -> None:
    whole = TrainerConfig(backend=Fsdp2Config(wrap="model"))
    with pytest.raises(ConfigError, match=r"tp = 2 does not go with trainer\.backend\.wrap"):
        check(whole, with_experts(DENSE, 8, 2, 20), tp=2)
    check(whole, tp=2)


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"tp": 3, "world": 3}, "3: sums have equal bits over 2, 4 or 8 ranks alone"),
        ({"tp": 8, "world": 8}, "8 is more than the 4 key-value heads"),
        ({"tp": 8, "cp": 2, "world": 16}, "8 is more than the 4 key-value heads"),
    ],
)
def test_what_ranks_cannot_share_is_named(axes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^split\.train\.tp = {words}"):
        check(TrainerConfig(), **axes)


@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        (TrainerConfig(lora=LoraConfig(rank=4)), "lora.rank = 4"),
        (TrainerConfig(weights="e4m3"), "weights = 'e4m3'"),
        (TrainerConfig(optimizer=OptimizerConfig(kind="muon")), "optimizer.kind = 'muon'"),
    ],
)
def test_settings_that_it_does_not_go_with_are_named(cfg: TrainerConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"tp = 2 does not go with trainer\.{words}"):
        check(cfg, tp=2)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_has_the_weights_that_are_counted(tp: int, tied: bool) -> None:
    spec = replace(DENSE, tie_embeddings=tied, row_shards=tp)
    with torch.device("meta"):
        model = CausalLM(spec, part=ModelPart(0, tp, trains=True))
    held = {name: tuple(one.shape) for name, one in model.named_parameters()}
    assert own_shapes(spec, "lm", tp) == held
    assert of_layers(spec, "lm", tp).all == sum(map(prod, held.values()))


@pytest.mark.parametrize("recompute", ["none", "cheap", "all"])
def test_ranks_share_weights_and_what_matrices_keep(recompute: Any) -> None:
    cfg = TrainerConfig(backend=Fsdp2Config(recompute=recompute), max_tokens=4096)
    spec = replace(DENSE, vocab_size=96)
    alone, shards, shared = (
        step_sizes(spec, cfg, plan_split({"train": RoleSplit(tp=tp)}, world).train)
        for tp, world in ((1, 1), (1, 2), (2, 2))
    )
    norms = 4 * sum(one.num_elements for one in spec.parameters() if one.cut is None)
    assert shared.master == (alone.master + norms) // 2
    assert shared.moments == 2 * shared.master
    assert shared.gathered < 0.6 * shards.gathered
    assert shared.activations.peak < shards.activations.peak
