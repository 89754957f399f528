"""A world of one rank inside the test process, over NCCL, and a small model for its GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from spmd_rl.mesh.role_context import Meshes, RoleContext
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.mesh.world import World
from tests.dist.train_case import write_model_folder

SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


@pytest.fixture(scope="module")
def context() -> Iterator[RoleContext]:
    backends = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backends, store=HashStore(), rank=0, world_size=1)
    world = World(rank=0, size=1, local_rank=0, local_size=1, node=0, run_id="test", restart=0)
    meshes = Meshes(world)
    placement = plan_split({"train": RoleSplit()}, 1).train
    meshes.build([placement])
    yield meshes.context(placement)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model_folder(tmp_path_factory.mktemp("model"))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | SIZES))
    return folder
