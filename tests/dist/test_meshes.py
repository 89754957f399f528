"""Meshes of roles that share some ranks, on four gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from spmd_rl.mesh.role_context import Meshes
from spmd_rl.mesh.split import Placement
from spmd_rl.mesh.world import World
from tests.dist.torchrun import on_ranks

pytestmark = pytest.mark.dist

AXES = {"pp": 1, "dp": 1, "fsdp": 1, "cp": 1, "tp": 1}
TRAIN = Placement("train", (0, 1, 2), AXES | {"fsdp": 3})
INFER = Placement("infer", (2, 3), AXES | {"tp": 2})


def on_rank(world: World) -> tuple[list[list[int]], str]:
    """Build the meshes of both roles, and return the groups asked for and what a shard hears."""
    asked: list[list[int]] = []
    new_group = dist.new_group

    def noted(ranks: list[int], *args: Any, **more: Any) -> Any:
        if more.get("backend") == "gloo":
            asked.append(ranks)
        return new_group(ranks, *args, **more)

    dist.new_group = noted
    meshes = Meshes(world)
    meshes.build([TRAIN, INFER])
    if world.rank not in INFER.ranks:
        return asked, ""
    heard = meshes.context(INFER).broadcast_in_shard(f"from {world.rank}".encode())
    return asked, heard.decode()


def test_only_its_own_ranks_make_a_shards_host_group() -> None:
    """With NCCL, a rank outside of a gloo group would wait for a split that nobody joins.

    Rank 2 has made more groups than rank 3 by then, and both name the new one alike.
    """
    reports = on_ranks(on_rank, 4)
    assert [heard for _, heard in reports] == ["", "", "from 2", "from 2"]
    for rank, (asked, _) in enumerate(reports):
        assert ([2, 3] in asked) == (rank in (2, 3))
        assert all(rank in ranks for ranks in asked)
