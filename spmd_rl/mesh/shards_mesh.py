"""The mesh over which FSDP2 shards weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spmd_rl.mesh.axes import DATA, size_of
from spmd_rl.mesh.role_context import RoleContext

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shards_mesh(context: RoleContext) -> DeviceMesh:
    """Return the role's mesh with the axes dp and fsdp alone: fsdp has the ranks along cp too.

    Ranks along tp have meshes of their own.
    Ranks: all of the role, in the same order. Blocks: no.
    """
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    placement = context.placement
    cp, tp = size_of(placement.axes, "cp"), size_of(placement.axes, "tp")
    if cp == tp == 1:
        return context.mesh
    sizes = [placement.of_shards.axes[axis] for axis in DATA]
    ranks = torch.tensor(placement.ranks).reshape(*sizes, tp)
    of_fsdp = context.axis_group(("fsdp", "cp")) if cp > 1 else context.mesh.get_group("fsdp")
    return DeviceMesh.from_group(
        [context.mesh.get_group("dp"), of_fsdp],
        context.world.device,
        mesh=ranks[..., placement.ranks.index(context.world.rank) % tp],
        mesh_dim_names=DATA,
    )
