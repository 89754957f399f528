"""Mixtures on a GPU: an engine's graphs and a trainer have the same bits, with adapters too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.model.hf import fill
from spmd_rl.model.layers.layer import Recompute
from spmd_rl.model.lora import LoraConfig
from spmd_rl.rollout.native.build import build
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.train.config import Fsdp2Config, TrainerConfig
from spmd_rl.train.trainer import Trainer
from spmd_rl.types.routes import EXPERT_IDS
from tests.dist.train_case import write_model_folder
from tests.gpu.train.backend import fsdp2
from tests.gpu.train.conftest import SIZES
from tests.gpu.train.test_lora import drawn, new_trainer

EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 24,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}
CONFIG = TrainerConfig(init="random", lr=1e-3, max_tokens=4000, deterministic=True)
ROUTER = "*.mlp.gate.weight"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model_folder(tmp_path_factory.mktemp("mixture"))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | SIZES | EXPERTS))
    return folder


def new_engine(trainer: Trainer, cuda_graphs: bool) -> NativeEngine:
    cfg = NativeEngineConfig(cuda_graphs=cuda_graphs, max_batch=32, max_step_tokens=256)
    adapted = trainer.cfg.adapted_base if trainer.cfg.lora.rank else None
    engine = build(cfg, trainer.model, trainer.context.device, lambda tokens: "", adapted=adapted)
    fill(engine.model, [(name, trainer.backend.gather(name)) for name in trainer.backend.names()])
    engine.sink().commit(0)
    return engine


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_an_engine_has_the_trainers_bits_and_routes(
    context: RoleContext, mixture: Path, cuda_graphs: bool, rank: int
) -> None:
    cfg = replace(CONFIG, lora=LoraConfig(rank=rank))
    trainer = new_trainer(context, mixture, cfg) if rank else Trainer(cfg, context, str(mixture))
    engine = new_engine(trainer, cuda_graphs)
    assert engine.contract() == trainer.numeric_contract()
    batch = drawn(engine)
    assert (engine.stats()["num_graphs"] > 0) == cuda_graphs
    scores = trainer.learner.score(batch)
    differs = scores.view(np.uint32) != batch.rollout_logprobs.view(np.uint32)
    assert int(batch.mask.sum()) > 1500
    assert int((differs & batch.mask).sum()) == 0


@pytest.mark.parametrize("recompute", ["none", "cheap", "all"])
@pytest.mark.parametrize("rank", [0, 8])
def test_a_training_step_flips_no_route_and_changes_weights(
    context: RoleContext, mixture: Path, rank: int, recompute: Recompute
) -> None:
    """The second step is compared under the first step's weights."""
    cfg = replace(CONFIG, backend=Fsdp2Config(recompute=recompute), lora=LoraConfig(rank=rank))
    trainer = new_trainer(context, mixture, cfg) if rank else Trainer(cfg, context, str(mixture))
    batch = drawn(new_engine(trainer, cuda_graphs=True))
    before = {name: trainer.backend.gather(name).clone() for name in trainer.backend.names()}
    stats = trainer.train_step(batch, grpo_loss)
    assert stats["onpolicy/compared_tokens"] == batch.mask.sum()
    assert stats["onpolicy/mismatched_tokens"] == 0
    assert stats["onpolicy/router_flips"] == 0
    assert stats["train/grad_norm"] > 0
    changed = [not torch.equal(one, trainer.backend.gather(name)) for name, one in before.items()]
    assert sum(changed) > 0.95 * len(changed), "all but experts without tokens"


def test_a_frozen_router_stays_as_it_is(context: RoleContext, mixture: Path) -> None:
    trainer = Trainer(replace(CONFIG, freeze=(ROUTER,)), context, str(mixture))
    batch = drawn(new_engine(trainer, cuda_graphs=True))
    routers = {name: one for name, one in fsdp2(trainer).parameters.items() if "mlp.gate." in name}
    before = {name: trainer.backend.gather(name).clone() for name in routers}
    assert len(before) == 3
    assert trainer.train_step(batch, grpo_loss)["train/grad_norm"] > 0
    for name, one in before.items():
        assert torch.equal(one, trainer.backend.gather(name)), name


@pytest.mark.parametrize("recompute", ["none", "cheap", "all"])
def test_replay_of_the_engines_routes_changes_no_bit(
    context: RoleContext, mixture: Path, recompute: Recompute
) -> None:
    cfg = replace(CONFIG, backend=Fsdp2Config(recompute=recompute))
    ended = []
    for replays in (True, False):
        trainer = Trainer(cfg, context, str(mixture))
        batch = drawn(new_engine(trainer, cuda_graphs=True), replay_routes=replays)
        assert (EXPERT_IDS in batch.columns) == replays
        stats = trainer.train_step(batch, grpo_loss)
        assert stats["onpolicy/mismatched_tokens"] == stats["onpolicy/router_flips"] == 0
        assert stats.get("experts/rerouted_worst", 0.0) == 0
        weights = {name: trainer.backend.gather(name).clone() for name in trainer.backend.names()}
        ended.append((stats["train/loss"], stats["train/grad_norm"], weights))
    (*numbers, weights), (*others, own) = ended
    assert numbers == others
    assert all(torch.equal(one, own[name]) for name, one in weights.items())


def test_control_other_routes_are_taken(context: RoleContext, mixture: Path) -> None:
    """The negative control: with the routes of another token, the trainer's numbers differ."""
    trainer = Trainer(CONFIG, context, str(mixture))
    batch = drawn(new_engine(trainer, cuda_graphs=True), replay_routes=True)
    moved = np.roll(batch.columns[EXPERT_IDS], 1, 0)
    turned = replace(batch, columns=batch.columns | {EXPERT_IDS: moved})
    stats = trainer.train_step(turned, grpo_loss)
    assert stats["experts/rerouted"] > 0.5
    assert stats["onpolicy/mean_abs_dlogp"] > 0
