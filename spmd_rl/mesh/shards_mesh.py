"""The mesh over which FSDP2 shards weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spmd_rl.mesh.axes import DATA
from spmd_rl.mesh.role_context import RoleContext

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shards_mesh(context: RoleContext) -> DeviceMesh:
    """Return the role's mesh with the axes dp and fsdp alone: fsdp has the ranks along cp too.

    Ranks: all of the role, in the same order. Blocks: no.
    """
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    placement = context.placement
    if placement.axes.get("cp", 1) == 1:
        return context.mesh[DATA] if placement.axes.get("tp", 1) > 1 else context.mesh
    sizes = [placement.of_shards.axes[axis] for axis in DATA]
    return DeviceMesh.from_group(
        [context.mesh.get_group("dp"), context.axis_group(("fsdp", "cp"))],
        context.world.device,
        mesh=torch.tensor(placement.ranks).reshape(sizes),
        mesh_dim_names=DATA,
    )
