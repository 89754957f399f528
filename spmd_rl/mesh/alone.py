"""A world of this process alone, for what needs torch.distributed and has one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from spmd_rl.mesh.role_context import Meshes, RoleContext
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.mesh.world import World, join


@contextmanager
def alone(role: str) -> Iterator[RoleContext]:
    """Join torch.distributed as the only rank, and leave it at the end.

    Returns the context of a role that has this rank.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    world = World(rank=0, size=1, local_rank=0, local_size=1, node=0, run_id="alone", restart=0)
    join(world, HashStore())
    try:
        placement = plan_split({role: RoleSplit()}, world.size)[role]
        meshes = Meshes(world)
        meshes.build([placement])
        yield meshes.context(placement)
    finally:
        dist.destroy_process_group()
