"""Optimizers on a GPU against torch's own, and gradients beside frozen parameters."""

from __future__ import annotations

import importlib.util
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.train.config import Fsdp2Config, OptimizerConfig, OptimizerKind, TrainerConfig, Wrap
from spmd_rl.train.optimizer.optimizers import build_optimizer
from spmd_rl.train.optimizer.parameter_groups import update_rules
from spmd_rl.train.trainer import Trainer
from spmd_rl.weights.local_tensors import LocalTensor
from spmd_rl.weights.plan.layout import Box
from tests.dist.torchrun import torchrun
from tests.dist.train_case import local_weights, make_batch

DEVICE = torch.device("cuda")
FREEZES = {
    "nothing": (),
    "a prefix": ("model.embed_tokens.*", "model.layers.0.*"),
    "all but the head": ("model.*",),
    "the head": ("lm_head.*",),
    "queries without a gradient": (
        "model.embed_tokens.*",
        "model.layers.0.input_layernorm.*",
        "model.layers.0.self_attn.q_*",
    ),
}


def changes(trainer: Trainer) -> dict[str, Tensor]:
    """What one step changes of each weight."""
    before = {name: one.local.detach().clone() for name, one in local_weights(trainer).items()}
    trainer.train_step(make_batch(0), grpo_loss)
    return {name: one.local - before[name] for name, one in local_weights(trainer).items()}


@pytest.mark.parametrize("wrap", ["layer", "model"])
@pytest.mark.parametrize("freeze", FREEZES.values(), ids=FREEZES)
def test_frozen_parameters_change_no_other_gradient(
    context: RoleContext, model: Path, freeze: tuple[str, ...], wrap: Wrap
) -> None:
    """With a large epsilon, AdamW's first step is in proportion to the gradient."""
    free, frozen = (
        changes(
            Trainer(
                TrainerConfig(
                    init="random",
                    lr=1e-2,
                    eps=1.0,
                    clip_norm=0.0,
                    freeze=patterns,
                    backend=Fsdp2Config(wrap=wrap),
                ),
                context,
                str(model),
            )
        )
        for patterns in ((), freeze)
    )
    for name, change in frozen.items():
        if any(fnmatchcase(name, pattern) for pattern in freeze):
            assert not change.any(), name
        else:
            assert change.any(), name
            assert (change - free[name]).norm() <= 0.02 * free[name].norm(), name


def steps(kind: OptimizerKind) -> tuple[Tensor, Tensor]:
    """A matrix after five steps by the trainer's optimizer, and by the library's own."""
    name, shape = "model.layers.0.mlp.up_proj.weight", (512, 256)
    generator = torch.Generator(DEVICE).manual_seed(0)
    first, *grads = (torch.randn(shape, device=DEVICE, generator=generator) for _ in range(6))
    ours, theirs = nn.Parameter(first.clone()), nn.Parameter(first.clone())
    cfg = TrainerConfig(lr=1e-2, weight_decay=0.1, optimizer=OptimizerConfig(kind))
    shards = {name: LocalTensor(shape, Box((0, 0), shape), ours)}
    rules = update_rules({name: shape}, cfg, 1)
    assert dist.group.WORLD is not None
    optimizer = build_optimizer(shards, rules, cfg, dist.group.WORLD)
    plain = library(kind, theirs)
    for grad in grads:
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        optimizer.step(cfg.lr)
        plain.step()
    return ours.detach(), theirs.detach()


def library(kind: OptimizerKind, parameter: nn.Parameter) -> torch.optim.Optimizer:
    lr, weight_decay = 1e-2, 0.1
    if kind == "muon":
        return torch.optim.Muon(
            [parameter], lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
        )
    if kind == "adamw":
        return torch.optim.AdamW([parameter], lr=lr, weight_decay=weight_decay, fused=True)
    from torchao.optim import AdamW8bit

    return AdamW8bit([parameter], lr=lr, weight_decay=weight_decay)


@pytest.mark.parametrize("kind", ["adamw", "muon", "adamw8bit"])
def test_the_optimizers_are_the_libraries_bit_for_bit(
    context: RoleContext, kind: OptimizerKind
) -> None:
    if kind == "adamw8bit" and importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    ours, theirs = steps(kind)
    assert torch.equal(ours, theirs)


def test_two_gpus_give_the_bits_of_one(tmp_path: Path) -> None:
    one, two = (
        torchrun(
            "train/optimizer_ranks.py", size, tmp_path / f"{size}", f"{tmp_path}/{size}", room="gpu"
        )
        for size in (1, 2)
    )
    assert one == two
    assert one["adamw"] != one["muon"]
