"""RoleContext: a role's rank, mesh and host collectives; Meshes: all meshes of one process.

Process groups are made in this module only, by every rank of the world in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spmd_rl.errors import PlanError
from spmd_rl.mesh.axes import DATA, MODEL, communicating_groups, mesh_axes, size_of
from spmd_rl.mesh.connection_proof import prove
from spmd_rl.mesh.split import Placement
from spmd_rl.mesh.world import COLLECTIVE_TIMEOUT, World
from spmd_rl.observe.trace import Trace

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Groups = dict[tuple[int, ...], "ProcessGroup"]  # by the ranks of each


@dataclass(eq=False)
class RoleContext:
    """The context that a role gets on one rank: its placement, mesh and process group.

    Roles of one process share `neighbours`, which each role joins when it is built, and `trace`.
    """

    world: World
    placement: Placement
    mesh: DeviceMesh
    group: ProcessGroup
    neighbours: dict[str, Any]
    trace: Trace = field(default_factory=Trace)
    shard_group: ProcessGroup | None = None  # None where a shard is one rank
    # of the ranks along some axes of the model, where that is neither one rank nor all of them
    axis_groups: Groups = field(default_factory=dict)
    row_shards: int = 1  # of models here (model/spec.py)

    @property
    def rank(self) -> int:
        """This process's number within the role."""
        return self.placement.ranks.index(self.world.rank)

    @property
    def size(self) -> int:
        return self.placement.size

    @property
    def data_rank(self) -> int:
        return self.placement.data_rank(self.world.rank)

    @property
    def data_size(self) -> int:
        return self.placement.data_size

    @property
    def device(self) -> torch.device:
        return self.world.own_device

    @property
    def shard_size(self) -> int:
        """The number of ranks that serve the same part of the data."""
        return self.size // self.data_size

    @property
    def shard_rank(self) -> int:
        return self.placement.shard_ranks(self.world.rank).index(self.world.rank)

    def axis_group(self, along: Sequence[str]) -> ProcessGroup:
        """Return the group of the ranks that differ from this one in the axes `along` alone.

        Ranks: all of the role, in the same order. Blocks: no.
        """
        import torch.distributed as dist

        ranks = self.placement.ranks_along(self.world.rank, along)
        if ranks == self.placement.ranks:
            return self.group
        if ranks not in self.axis_groups and len(ranks) == 1:
            self.axis_groups[ranks] = dist.new_group(
                list(ranks), COLLECTIVE_TIMEOUT, use_local_synchronization=True
            )
        return self.axis_groups[ranks]

    def axis_mesh(self, along: Sequence[str]) -> DeviceMesh:
        """Return the ranks that `axis_group` has, as a mesh of one axis.

        Ranks: all of the role, in the same order. Blocks: no.
        """
        from torch.distributed.device_mesh import DeviceMesh

        group = self.axis_group(along)
        return DeviceMesh.from_group(group, self.world.device, mesh_dim_names=("_".join(along),))

    def shards_mesh(self) -> DeviceMesh:
        """Return the mesh over which FSDP2 shards weights: fsdp has the ranks along cp too.

        It has the axes dp and fsdp alone. Ranks along tp have meshes of their own.
        Ranks: all of the role, in the same order. Blocks: no.
        """
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        placement, mesh = self.placement, self.mesh
        cp, tp = size_of(placement.axes, "cp"), size_of(placement.axes, "tp")
        if cp == tp == 1:
            return mesh
        sizes = [placement.of_shards.axes[axis] for axis in DATA]
        ranks = torch.tensor(placement.ranks).reshape(*sizes, tp)
        of_fsdp = self.axis_group(("fsdp", "cp")) if cp > 1 else mesh.get_group("fsdp")
        return DeviceMesh.from_group(
            [mesh.get_group("dp"), of_fsdp],
            self.world.device,
            mesh=ranks[..., self.rank % tp],
            mesh_dim_names=DATA,
        )

    def broadcast_in_shard(self, blob: bytes) -> bytes:
        """Return the `blob` of the shard's first rank.

        Ranks: all of the shard. Blocks: until each has called.
        """
        import torch
        import torch.distributed as dist

        if self.shard_group is None:
            return blob
        size = torch.tensor([len(blob)], dtype=torch.int64)
        dist.broadcast(size, group=self.shard_group, group_src=0)
        shared = torch.empty(int(size.item()), dtype=torch.uint8)
        if self.shard_rank == 0:
            shared.numpy()[:] = np.frombuffer(blob, np.uint8)
        dist.broadcast(shared, group=self.shard_group, group_src=0)
        return shared.numpy().tobytes()

    def neighbour(self, role_name: str) -> Any | None:
        """Return the instance of another role in this process, if there is one."""
        return self.neighbours.get(role_name)

    def all_reduce_sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum over the role's ranks, on the host.

        Ranks: all of the role. Blocks: until each has called.
        """
        import torch
        import torch.distributed as dist

        summed = torch.tensor(np.asarray(values, dtype=np.float64))
        dist.all_reduce(summed, group=self.group)
        return summed.numpy()

    def all_reduce_max(self, value: int) -> int:
        """Return the largest `value` of the role's ranks.

        Ranks: all of the role. Blocks: until each has called.
        """
        return _all_reduce_max(value, self.group)

    def all_gather_bytes(self, blob: bytes, group: ProcessGroup | None = None) -> list[bytes]:
        """Return the `blob` of each of the role's ranks, in their order.

        `group` is another process group of the same ranks, to be used instead of the role's own.

        Ranks: all of the role. Blocks: until each has called.
        """
        return _all_gather_bytes(blob, group or self.group)

    def all_gather_in_shard(self, blob: bytes) -> list[bytes]:
        """Return the `blob` of each rank of the shard, in their order.

        Ranks: all of the shard. Blocks: until each has called.
        """
        if self.shard_group is None:
            return [blob]
        return _all_gather_bytes(blob, self.shard_group)

    def all_gather_numbers(self, values: Sequence[int], along: Sequence[str]) -> list[list[int]]:
        """Return the equally many `values` of each rank that `axis_group` has, in their order.

        Ranks: all of that group. Blocks: until each has called.
        """
        import torch

        row = torch.tensor(values, dtype=torch.int64)
        return [gathered.tolist() for gathered in _all_gather(row, self.axis_group(along))]

    def side_group(self) -> ProcessGroup:
        """Make a new gloo group of the role's ranks, for collectives of a second thread.

        Ranks: all of the role. Blocks: until each has called.
        """
        _make_equally_many_groups(self.world.rank, self.group)
        return _gloo_group(self.world, self.placement.ranks)

    def barrier(self) -> None:
        """Wait for all ranks of the role.

        Ranks: all of the role. Blocks: until each has called.
        """
        self.all_reduce_max(0)


class Meshes:
    """The meshes of one process, and the roles that live in it by name."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.neighbours: dict[str, Any] = {}
        self.trace = Trace()
        self._built: dict[tuple[Any, ...], RoleContext] = {}

    def build(self, placements: list[Placement]) -> None:
        """Build the mesh and the group of each placement; equal placements share them.

        Ranks: all of the world with the same list, also those that no placement contains.
        Blocks: until each has called.
        """
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        for placement in placements:
            if placement.layout not in self._built:
                axes = mesh_axes(placement.axes)
                sizes = [placement.axes[axis] for axis in axes]
                ranks = torch.tensor(placement.ranks).reshape(sizes)
                mesh = DeviceMesh(self.world.device, ranks, mesh_dim_names=tuple(axes))
                group = dist.new_group(list(placement.ranks), timeout=COLLECTIVE_TIMEOUT)
                if self.world.rank in placement.ranks:
                    prove(self.world, group)
                    self._prepare_axes(mesh)
                self._built[placement.layout] = RoleContext(
                    self.world,
                    placement,
                    mesh,
                    group,
                    self.neighbours,
                    shard_group=self._shard_group(placement, group),
                    axis_groups=self._axis_groups(placement),
                )

    def _shard_group(self, placement: Placement, group: ProcessGroup) -> ProcessGroup | None:
        """Make a host group of this rank's shard, where a shard has several ranks.

        Only its ranks take part. Where the world has NCCL, torch has the others wait in a split of
        NCCL's communicator, which members of a group without NCCL do not join.
        """
        if placement.size == placement.data_size or self.world.rank not in placement.ranks:
            return None
        _make_equally_many_groups(self.world.rank, group)
        return _gloo_group(self.world, placement.shard_ranks(self.world.rank))

    def _axis_groups(self, placement: Placement) -> Groups:
        """Make the groups in which the ranks of a shard of a model talk to each other."""
        import torch.distributed as dist

        joined: Groups = {}
        if all(placement.axes.get(axis, 1) == 1 for axis in MODEL):
            return joined
        for ranks in communicating_groups(placement.ranks, placement.axes):
            group = dist.new_group(list(ranks), timeout=COLLECTIVE_TIMEOUT)
            if self.world.rank in ranks:
                prove(self.world, group)
                joined[ranks] = group
        return joined

    def _prepare_axes(self, mesh: DeviceMesh) -> None:
        """Set the timeout of the groups of a mesh, and prove their connections."""
        from torch.distributed.distributed_c10d import _set_pg_timeout

        for axis in DATA:
            _set_pg_timeout(COLLECTIVE_TIMEOUT, mesh.get_group(axis))
            prove(self.world, mesh.get_group(axis))

    def context(self, placement: Placement, row_shards: int = 1) -> RoleContext:
        """Return this process's context in `placement`, whose mesh `build` has made.

        Raises: PlanError when `build` has not made it.
        """
        if (built := self._built.get(placement.layout)) is None:
            raise PlanError(f"placement '{placement.name}' was not made by this world's split")
        return replace(built, placement=placement, trace=self.trace, row_shards=row_shards)


def _all_gather(own: torch.Tensor, group: ProcessGroup) -> list[torch.Tensor]:
    """Return the tensor of each rank of a group; all have the same shape."""
    import torch
    import torch.distributed as dist

    gathered = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(gathered, own, group=group)
    return gathered


def _all_gather_bytes(blob: bytes, group: ProcessGroup) -> list[bytes]:
    """Return the `blob` of each rank of a group."""
    import torch

    sizes = [int(size) for size in _all_gather(torch.tensor([len(blob)]), group)]
    padded = torch.from_numpy(np.frombuffer(blob.ljust(max(sizes), b"\0"), np.uint8).copy())
    blobs = zip(_all_gather(padded, group), sizes, strict=True)
    return [gathered[:size].numpy().tobytes() for gathered, size in blobs]


def _all_reduce_max(value: int, group: ProcessGroup) -> int:
    """Return the largest `value` of the ranks of a group."""
    import torch
    import torch.distributed as dist

    largest = torch.tensor([value], dtype=torch.int64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return int(largest.item())


def _gloo_group(world: World, ranks: Sequence[int]) -> ProcessGroup:
    """Make a proven gloo group, of which this rank is one. Ranks: all of these."""
    import torch.distributed as dist

    group = dist.new_group(
        list(ranks), COLLECTIVE_TIMEOUT, backend="gloo", use_local_synchronization=True
    )
    prove(world, group)
    return group


def _make_equally_many_groups(rank: int, group: ProcessGroup) -> None:
    """Have each rank of `group` make groups of itself until it has as many as the others.

    torch names a group that only some ranks make by the number of groups that a rank has. With
    different names, the ranks would wait for each other until the deadline.

    Ranks: all of `group`. Blocks: until each has called.
    """
    import torch.distributed as dist

    names = dist.distributed_c10d._world.pg_names
    for _ in range(_all_reduce_max(len(names), group) - len(names)):
        dist.new_group([rank], backend="gloo", use_local_synchronization=True)
