"""A world of one rank inside the test process: FSDP2 and gloo, no launcher, no port."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from spmd_rl.mesh.role_context import Meshes, RoleContext
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.mesh.world import World
from spmd_rl.train.config import Fsdp2Config, TrainerConfig
from spmd_rl.train.trainer import Trainer
from tests.dist.train_case import write_model_folder

BACKEND = ("wrap", "recompute", "offload", "offload_activations")
NewTrainer = Callable[..., Trainer]


@pytest.fixture(scope="session")
def context() -> Iterator[RoleContext]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = World(rank=0, size=1, local_rank=0, local_size=1, node=0, run_id="test", restart=0)
    meshes = Meshes(world)
    placement = plan_split({"train": RoleSplit()}, 1).train
    meshes.build([placement])
    yield meshes.context(placement)
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def new_trainer(context: RoleContext, model_folder: Path) -> NewTrainer:
    def build(**options: object) -> Trainer:
        model = str(options.pop("model", model_folder))
        names = [name for name in BACKEND if name in options]
        backend = Fsdp2Config(**{name: options.pop(name) for name in names})
        defaults = {"init": "random", "lr": 1e-2, "eps": 1e-4, "backend": backend}
        return Trainer(TrainerConfig(**(defaults | options)), context, model)

    return build
