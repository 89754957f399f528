"""A trainer and a frozen model on a GPU give their memory back, and go on with the same bits."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.errors import ResidencyError
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.model.read import read_spec
from spmd_rl.offload.phases import ALL, RoleSleep
from spmd_rl.train.config import FrozenConfig, OptimizerConfig, OptimizerKind, TrainerConfig
from spmd_rl.train.frozen import FrozenModel
from spmd_rl.train.trainer import Trainer
from tests.dist.train_case import make_batch
from tests.gpu.train.backend import fsdp2

CONFIG = TrainerConfig(init="random", lr=1e-2, max_tokens=150, deterministic=True)
PHASES = {"sync": ("master",), "rollout": (), "train": ALL}
WIDE = {"hidden_size": 2048, "intermediate_size": 8192}
SHARE = 0.99  # of what its regions hold that a sleeping role gives back


@pytest.fixture(scope="module")
def wide(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model so large that pages of 2 MiB do not count."""
    folder = tmp_path_factory.mktemp("wide")
    shutil.copytree(model, folder, dirs_exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | WIDE))
    return folder


KEPT: list[object] = []  # memory of regions may not be freed before the process ends


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def weights_of(trainer: Trainer) -> list[torch.Tensor]:
    return [one.local.detach().clone() for one in fsdp2(trainer).local_weights().values()]


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_trainer_gives_its_memory_back_and_learns_on(
    context: RoleContext, wide: Path, kind: OptimizerKind
) -> None:
    cfg, batch = replace(CONFIG, optimizer=OptimizerConfig(kind=kind)), make_batch()
    awake = Trainer(cfg, context, str(wide))
    for _ in range(3):
        awake.train_step(batch, grpo_loss)
    expected = weights_of(awake)
    del awake
    trainer = Trainer(cfg, context, str(wide), sleep=RoleSleep(f"train-{kind}", PHASES))
    KEPT.append(trainer)
    num_moments = {"adamw": 2, "muon": 1}[kind]  # of the matrices of layers, which are nearly all
    num_bytes = (1 + num_moments) * 4 * read_spec(wide).num_parameters
    for number in range(3):
        trainer.train_step(batch, grpo_loss)
        pointers = [one.local.data_ptr() for one in fsdp2(trainer).local_weights().values()]
        before = free_bytes()
        trainer.sleep()
        assert free_bytes() - before >= SHARE * num_bytes
        with pytest.raises(ResidencyError, match="which sleeps"):
            trainer.train_step(batch, grpo_loss)
        trainer.wake(("master",))
        trainer.wake(("moments",))
        assert pointers == [
            one.local.data_ptr() for one in fsdp2(trainer).local_weights().values()
        ], f"addresses change in step {number}"
    assert all(map(torch.equal, weights_of(trainer), expected))


@pytest.mark.alone
def test_a_frozen_model_gives_its_memory_back(context: RoleContext, wide: Path) -> None:
    cfg, batch = FrozenConfig.like(CONFIG), make_batch()
    sleep = RoleSleep("reference", {"rollout": (), "train": ALL})
    frozen = FrozenModel(cfg, context, str(wide), sleep=sleep)
    KEPT.append(frozen)
    expected = frozen.score(batch).values.tobytes()
    num_bytes = 2 * read_spec(wide).num_parameters
    for _ in range(3):
        before = free_bytes()
        frozen.sleep()
        assert free_bytes() - before >= SHARE * num_bytes
        with pytest.raises(ResidencyError, match="which sleeps"):
            frozen.score(batch)
        frozen.wake()
        assert frozen.score(batch).values.tobytes() == expected
