"""Moments, master weights and activations in host memory: the same bits in less GPU memory."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.kernels.attention.flash import flash_supports
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.offload.role_memory import RoleMemory
from spmd_rl.train.config import Fsdp2Config, TrainerConfig
from spmd_rl.train.optimizer.adamw import ShardedAdamW
from spmd_rl.train.optimizer.moment_chunks import UNIT
from spmd_rl.train.optimizer.parameter_groups import UpdateRule
from spmd_rl.train.optimizer.streamed_adamw import StreamedAdamW
from spmd_rl.train.trainer import Trainer
from spmd_rl.types.batch import Batch
from spmd_rl.weights.local_tensors import LocalTensors
from tests.dist.train_case import make_batch
from tests.gpu.train.backend import fsdp2

DEVICE = torch.device("cuda")
MIB = 1 << 20
DEEP = {"num_hidden_layers": 12, "hidden_size": 512, "intermediate_size": 1024}
MODES = ("none", "moments", "master")


@pytest.fixture(scope="module")
def deep(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers keep a lot, and whose weights take some tens of MiB."""
    folder = tmp_path_factory.mktemp("deep")
    config = json.loads((model / "config.json").read_text()) | DEEP
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def _needs_flash() -> None:
    if not flash_supports(64, torch.bfloat16, DEVICE):
        pytest.skip("needs FlashAttention-4 on a Hopper GPU")


@cache
def long_batch(seed: int = 0) -> Batch:
    return make_batch(seed, num_groups=96, num_samples=8, longest=120)


def config(**backend: Any) -> TrainerConfig:
    options: dict[str, Any] = {"wrap": "layer", "recompute": "all"} | backend
    return TrainerConfig(
        init="random",
        lr=1e-3,
        max_tokens=1 << 20,
        deterministic=True,
        backend=Fsdp2Config(**options),
    )


def steps(trainer: Trainer, seeds: range) -> list[dict[str, float]]:
    found = [trainer.train_step(make_batch(seed), grpo_loss) for seed in seeds]
    return [{name: one[name] for name in one if name.startswith(("train/", "on"))} for one in found]


def state(trainer: Trainer) -> dict[tuple[str, str], Tensor]:
    return {
        (kind, name): one.local.detach().cpu().clone()
        for kind, tensors in trainer.backend.state().items()
        for name, one in tensors
    }


def unequal(one: Trainer, other: Trainer) -> list[tuple[str, str]]:
    ours, theirs = state(one), state(other)
    assert ours.keys() == theirs.keys()
    return [key for key in ours if not torch.equal(ours[key], theirs[key])]


@pytest.mark.usefixtures("_needs_flash")
@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize("offload", MODES)
def test_no_bit_changes(
    context: RoleContext, model: Path, monkeypatch, offload: str, activations: bool
) -> None:
    monkeypatch.setattr("spmd_rl.train.fsdp2.activation_offload.LEAST_BYTES", 1)
    plain = Trainer(replace(config(), max_tokens=150), context, str(model))
    cfg = replace(config(offload=offload, offload_activations=activations), max_tokens=150)
    offloading = Trainer(cfg, context, str(model))
    assert steps(offloading, range(3)) == steps(plain, range(3))
    assert unequal(offloading, plain) == []


@pytest.mark.usefixtures("_needs_flash")
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_no_bit_changes_with_long_sequences(
    context: RoleContext, deep: Path, recompute: str
) -> None:
    """Copies take about as long as the layers that they run beside."""
    plain, offloading = (
        Trainer(config(recompute=recompute, offload_activations=one), context, str(deep))
        for one in (False, True)
    )
    for seed in range(3):
        for one in (plain, offloading):
            one.train_step(long_batch(seed), grpo_loss)
    assert unequal(offloading, plain) == []


@dataclass
class Usage:
    """Bytes in use after the trainer was built, while a loss is computed, and at most."""

    built: int
    computing: int
    peak: int


def usage(context: RoleContext, model: Path, batch: Batch, **backend: Any) -> Usage:
    """Return what a trainer takes of the GPU: by the driver, and at most by torch's allocator."""
    gc.collect()  # trainers before this one are in reference cycles
    torch.cuda.empty_cache()
    before = _used()
    trainer = Trainer(config(**backend), context, str(model))
    trainer.train_step(batch, grpo_loss)  # so that libraries have their workspaces
    torch.cuda.empty_cache()
    built, computing = _used() - before, 0

    def loss(out):
        nonlocal computing
        torch.cuda.empty_cache()
        computing = _used() - before
        return grpo_loss(out)

    torch.cuda.reset_peak_memory_stats()
    trainer.train_step(batch, loss)
    return Usage(built, computing, torch.cuda.max_memory_allocated())


def _used() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.alone
@pytest.mark.usefixtures("_needs_flash")
def test_moments_and_master_weights_leave_the_gpu(context: RoleContext, deep: Path) -> None:
    usage(context, deep, make_batch())  # the first trainer's workspaces stay
    none, moments, master = (usage(context, deep, make_batch(), offload=one) for one in MODES)
    trainer = Trainer(config(), context, str(deep))
    fp32 = 4 * sum(one.numel() for one in fsdp2(trainer).local.values())
    assert fp32 > 64 * MIB
    assert none.built - moments.built > 1.8 * fp32
    assert none.computing - moments.computing > 1.8 * fp32
    assert moments.computing - master.computing > 0.9 * fp32


@pytest.mark.usefixtures("_needs_flash")
def test_activations_leave_the_gpu(context: RoleContext, deep: Path) -> None:
    usage(context, deep, long_batch())
    plain, offloading = (
        usage(context, deep, long_batch(), offload_activations=one) for one in (False, True)
    )
    pair = 2 * long_batch().num_tokens * DEEP["hidden_size"] * 2
    assert pair > 32 * MIB
    assert plain.peak - offloading.peak > 6 * pair


@pytest.mark.usefixtures("_needs_flash")
@pytest.mark.parametrize("kinds", [("none", "master"), ("master", "none"), ("moments", "master")])
def test_a_checkpoint_goes_on_with_any_other_offload(
    context: RoleContext, model: Path, tmp_path: Path, kinds: tuple[str, str]
) -> None:
    whole, resumed = (Trainer(config(offload=one), context, str(model)) for one in kinds)
    steps(whole, range(2))
    whole.save(str(tmp_path / "saved"))
    steps(whole, range(2, 4))  # while it is written
    whole.wait_until_saved()
    resumed.load(str(tmp_path / "saved"))
    steps(resumed, range(2, 4))
    assert unequal(whole, resumed) == []


@pytest.mark.parametrize("chunk", [UNIT, 1 << 16, 1 << 24])
def test_the_streamed_kernel_has_torchs_bits(chunk: int) -> None:
    """Tensors of odd sizes, some in many chunks, and gradients that come and go."""
    sizes = {"model.a": (1000, 1001), "model.b": (7,), "model.c": (3, 5, 11), "model.d": (1 << 20,)}
    rules = {name: UpdateRule("adamw", 2.0, 0.1 * len(shape)) for name, shape in sizes.items()}
    generator = torch.Generator(DEVICE).manual_seed(0)

    def random(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, device=DEVICE, generator=generator)

    first = {name: random(shape) for name, shape in sizes.items()}
    ours, torchs = (
        LocalTensors.whole({name: nn.Parameter(one.clone()) for name, one in first.items()})
        for _ in range(2)
    )
    cfg = TrainerConfig(betas=(0.8, 0.95))
    reserve = RoleMemory(None, DEVICE).reserve
    optimizers = StreamedAdamW(ours, rules, cfg, reserve, chunk), ShardedAdamW(torchs, rules, cfg)
    for step in range(4):
        for name, shape in sizes.items():
            gradient = None if (name, step) == ("model.b", 1) else random(shape)
            for held in (ours, torchs):
                held[name].local.grad = gradient
        for optimizer in optimizers:
            optimizer.step(1e-2 / (1 + step))
    for name in sizes:
        assert torch.equal(ours[name].local, torchs[name].local), name
    for kind, moments in optimizers[0].state().items():
        for (name, one), (_, other) in zip(moments, optimizers[1].state()[kind], strict=True):
            assert torch.equal(one.local, other.local.cpu()), (kind, name)
