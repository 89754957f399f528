"""Adapters on a GPU: an engine and a trainer have the same bits, and a base sleeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.algo.packing import pack
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.model.hf import fill
from spmd_rl.model.layers.layer import Recompute
from spmd_rl.model.layers.mlp_module import GatedMlp
from spmd_rl.model.lora import LoraConfig
from spmd_rl.model.read import read_spec
from spmd_rl.offload.phases import ALL, RoleSleep
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.native.build import build
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.train.config import Fsdp2Config, TrainerConfig
from spmd_rl.train.trainer import Trainer
from spmd_rl.types.batch import Batch
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from tests.dist.train_case import make_batch
from tests.gpu.train.backend import fsdp2
from tests.gpu.train.test_sleep import SHARE, free_bytes, wide
from tests.samples import finish

__all__ = ["wide"]

CONFIG = TrainerConfig(
    init="random", lr=1e-2, max_tokens=4000, deterministic=True, lora=LoraConfig(rank=8)
)
VOCAB, MAX_POSITIONS = 512, 160


def new_trainer(context: RoleContext, model: Path, cfg: TrainerConfig) -> Trainer:
    """Return a trainer whose adapters are random, B too."""
    trainer = Trainer(cfg, context, str(model))
    generator = torch.Generator().manual_seed(1)
    shapes = cfg.lora.shapes(read_spec(model))
    fsdp2(trainer).fill(
        (name, torch.randn(shape, generator=generator) * 0.1) for name, shape in shapes.items()
    )
    return trainer


def new_engine(trainer: Trainer, cuda_graphs: bool) -> NativeEngine:
    """Return an engine with the trainer's adapters."""
    cfg = NativeEngineConfig(cuda_graphs=cuda_graphs, max_batch=32, max_step_tokens=256)
    adapted, device = trainer.cfg.adapted_base, trainer.context.device
    engine = build(cfg, trainer.model, device, lambda tokens: "", adapted=adapted)
    backend = trainer.backend
    fill(engine.model, [(name, backend.gather(name)) for name in backend.names()])
    engine.sink().commit(0)
    return engine


def drawn(engine: NativeEngine, **sampling: Any) -> Batch:
    """Return answers of 1 to 90 tokens to prompts of 1 to 60."""
    rng = np.random.default_rng(0)
    requests = [
        Request(
            uid,
            index,
            np.random.default_rng(uid).integers(2, VOCAB, 1 + 5 * uid).astype(np.int32),
            SamplingConfig(max_tokens=int(rng.integers(1, 90)), ignore_eos=True, **sampling),
        )
        for uid in range(12)
        for index in range(4)
    ]
    samples = finish(engine, requests)
    groups = [
        Group(Prompt(uid, requests[4 * uid].prompt), [samples[uid, index] for index in range(4)])
        for uid in range(12)
    ]
    return pack(groups, [np.ones(4)] * 12)


@pytest.mark.parametrize("rank", [8, 3, 64])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_an_engine_has_the_trainers_bits(
    context: RoleContext, model: Path, cuda_graphs: bool, rank: int
) -> None:
    cfg = replace(CONFIG, lora=LoraConfig(rank=rank, alpha=5.0))
    trainer = new_trainer(context, model, cfg)
    engine = new_engine(trainer, cuda_graphs)
    assert engine.contract() == trainer.numeric_contract()
    mlp = engine.model.model.layers[0].mlp
    assert isinstance(mlp, GatedMlp)
    assert (mlp.joined is not None) == cuda_graphs
    batch = drawn(engine)
    scores = trainer.learner.score(batch)
    differs = scores.view(np.uint32) != batch.rollout_logprobs.view(np.uint32)
    assert int(batch.mask.sum()) > 1500
    assert int((differs & batch.mask).sum()) == 0
    # without the adapters the log-probs are others
    shapes = cfg.lora.shapes(read_spec(model))
    fsdp2(trainer).fill((name, torch.zeros(shape)) for name, shape in shapes.items())
    others = trainer.learner.score(batch).view(np.uint32)
    differs = others != batch.rollout_logprobs.view(np.uint32)
    assert int((differs & batch.mask).sum()) > 1000


@pytest.mark.parametrize("recompute", ["none", "cheap", "all"])
def test_the_bits_are_the_same_in_the_training_forward(
    context: RoleContext, model: Path, recompute: Recompute
) -> None:
    cfg = replace(CONFIG, backend=Fsdp2Config(recompute=recompute))
    trainer = new_trainer(context, model, cfg)
    batch = drawn(new_engine(trainer, cuda_graphs=True))
    base = {name: trainer.backend.gather(name).clone() for name in fsdp2(trainer).base}
    stats = trainer.train_step(batch, grpo_loss)
    assert stats["onpolicy/compared_tokens"] == batch.mask.sum()
    assert stats["onpolicy/mismatched_tokens"] == 0
    assert stats["train/grad_norm"] > 0
    assert all(torch.equal(one, trainer.backend.gather(name)) for name, one in base.items())


@pytest.mark.alone
def test_a_base_sleeps_while_its_adapters_are_awake(context: RoleContext, wide: Path) -> None:
    batch = make_batch()
    awake = Trainer(CONFIG, context, str(wide))
    losses = [awake.train_step(batch, grpo_loss)["train/loss"] for _ in range(3)]
    del awake
    sleep = RoleSleep("train-lora", {"sync": ("master",), "rollout": (), "train": ALL})
    trainer = Trainer(CONFIG, context, str(wide), sleep=sleep)
    num_bytes = 2 * read_spec(wide).num_parameters
    copied = []
    for loss in losses:
        before = free_bytes()
        copied.append(trainer.sleep()[0].copied_bytes)
        trainer.wake(("master",))
        assert free_bytes() - before >= SHARE * num_bytes
        assert trainer.weight_source().layout(0).pieces
        trainer.wake()
        assert trainer.train_step(batch, grpo_loss)["train/loss"] == loss
    # ranges of memory are copied, with what lies between tensors
    assert copied[0] - copied[1] == pytest.approx(num_bytes, rel=1e-3), "the base is copied once"
