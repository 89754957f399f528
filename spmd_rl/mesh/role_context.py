"""RoleContext: a role's rank, mesh and host collectives; Meshes: all meshes of one process.

Process groups are made in this module only, by every rank of the world in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spmd_rl.errors import PlanError
from spmd_rl.mesh.axes import DATA, MODEL, SHARD, communicating_groups, groups_along, mesh_axes
from spmd_rl.mesh.connection_proof import prove
from spmd_rl.mesh.split import Placement
from spmd_rl.mesh.world import COLLECTIVE_TIMEOUT, World
from spmd_rl.observe.trace import Trace

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Groups = dict[tuple[int, ...], "ProcessGroup"]  # by the ranks of each


class RoleContext:
    """The context that a role gets on one rank: its placement, mesh and process group.

    Roles of one process share `neighbours`, which each role joins when it is built, and `trace`.
    """

    def __init__(
        self,
        world: World,
        placement: Placement,
        mesh: DeviceMesh,
        group: ProcessGroup,
        neighbours: dict[str, Any],
        trace: Trace | None = None,
        shard_group: ProcessGroup | None = None,
        axis_groups: Groups | None = None,
        row_shards: int = 1,
    ) -> None:
        self.world = world
        self.placement = placement
        self.mesh = mesh
        self.group = group
        self.trace = trace or Trace()
        self.row_shards = row_shards  # of models here (model/spec.py)
        self._neighbours = neighbours
        self._shard_group = shard_group  # None where a shard is one rank
        # of the ranks along some axes of the model, where that is neither one rank nor all of them
        self._axis_groups = {} if axis_groups is None else axis_groups

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
        if ranks not in self._axis_groups and len(ranks) == 1:
            self._axis_groups[ranks] = dist.new_group(
                list(ranks), COLLECTIVE_TIMEOUT, use_local_synchronization=True
            )
        return self._axis_groups[ranks]

    def axis_mesh(self, along: Sequence[str]) -> DeviceMesh:
        """Return the ranks that `axis_group` has, as a mesh of one axis.

        Ranks: all of the role, in the same order. Blocks: no.
        """
        from torch.distributed.device_mesh import DeviceMesh

        group = self.axis_group(along)
        return DeviceMesh.from_group(group, self.world.device, mesh_dim_names=("_".join(along),))

    def broadcast_in_shard(self, blob: bytes) -> bytes:
        """Return the `blob` of the shard's first rank.

        Ranks: all of the shard. Blocks: until each has called.
        """
        import torch
        import torch.distributed as dist

        if self._shard_group is None:
            return blob
        size = torch.tensor([len(blob)], dtype=torch.int64)
        dist.broadcast(size, group=self._shard_group, group_src=0)
        shared = torch.empty(int(size.item()), dtype=torch.uint8)
        if self.shard_rank == 0:
            shared.numpy()[:] = np.frombuffer(blob, np.uint8)
        dist.broadcast(shared, group=self._shard_group, group_src=0)
        return shared.numpy().tobytes()

    def neighbour(self, role_name: str) -> Any | None:
        """Return the instance of another role in this process, if there is one."""
        return self._neighbours.get(role_name)

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
        import torch
        import torch.distributed as dist

        largest = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return int(largest.item())

    def all_gather_bytes(self, blob: bytes, group: ProcessGroup | None = None) -> list[bytes]:
        """Return the `blob` of each of the role's ranks, in their order.

        `group` is another process group of the same ranks, to be used instead of the role's own.

        Ranks: all of the role. Blocks: until each has called.
        """
        return _all_gather_bytes(blob, group or self.group, self.size)

    def all_gather_in_shard(self, blob: bytes) -> list[bytes]:
        """Return the `blob` of each rank of the shard, in their order.

        Ranks: all of the shard. Blocks: until each has called.
        """
        if self._shard_group is None:
            return [blob]
        return _all_gather_bytes(blob, self._shard_group, self.shard_size)

    def all_gather_numbers(self, values: Sequence[int], along: Sequence[str]) -> list[list[int]]:
        """Return the equally many `values` of each rank that `axis_group` has, in their order.

        Ranks: all of that group. Blocks: until each has called.
        """
        import torch
        import torch.distributed as dist

        own, group = torch.tensor(values, dtype=torch.int64), self.axis_group(along)
        gathered = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(gathered, own, group=group)
        return [one.tolist() for one in gathered]

    def side_group(self) -> ProcessGroup:
        """Make a new gloo group of the role's ranks, for collectives of a second thread.

        Ranks: all of the role. Blocks: until each has called.
        """
        import torch.distributed as dist

        _make_equally_many_groups(self.world.rank, self.group)
        ranks = list(self.placement.ranks)
        group = dist.new_group(
            ranks, COLLECTIVE_TIMEOUT, backend="gloo", use_local_synchronization=True
        )
        prove(self.world, group)
        return group

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
        self._built: dict[tuple[Any, ...], tuple[DeviceMesh, ProcessGroup]] = {}
        self._shard_groups: dict[tuple[Any, ...], ProcessGroup] = {}
        self._axis_groups: dict[tuple[Any, ...], Groups] = {}

    def build(self, placements: list[Placement]) -> None:
        """Build the mesh and the group of each placement; equal placements share them.

        Ranks: all of the world with the same list, also those that no placement contains.
        Blocks: until each has called.
        """
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        for placement in placements:
            if _key(placement) not in self._built:
                axes = mesh_axes(placement.axes)
                shape = tuple(placement.axes[axis] for axis in axes)
                ranks = torch.tensor(placement.ranks).reshape(shape)
                mesh = DeviceMesh(self.world.device, ranks, mesh_dim_names=tuple(axes))
                group = dist.new_group(list(placement.ranks), timeout=COLLECTIVE_TIMEOUT)
                if self.world.rank in placement.ranks:
                    prove(self.world, group)
                    self._prepare_axes(mesh)
                self._built[_key(placement)] = (mesh, group)
                self._build_shard_groups(placement)
                self._build_axis_groups(placement)

    def _build_shard_groups(self, placement: Placement) -> None:
        """Make a host group of this rank's shard, where a shard has several ranks.

        Only its ranks take part. Where the world has NCCL, torch has the others wait in a split of
        NCCL's communicator, which members of a group without NCCL do not join.
        """
        import torch.distributed as dist

        if placement.size == placement.data_size or self.world.rank not in placement.ranks:
            return
        _make_equally_many_groups(self.world.rank, self._built[_key(placement)][1])
        shards = groups_along(placement.ranks, placement.axes, SHARD)
        (own,) = [list(ranks) for ranks in shards if self.world.rank in ranks]
        group = dist.new_group(
            own, COLLECTIVE_TIMEOUT, backend="gloo", use_local_synchronization=True
        )
        prove(self.world, group)
        self._shard_groups[_key(placement)] = group

    def _build_axis_groups(self, placement: Placement) -> None:
        """Make the groups in which the ranks of a shard of a model talk to each other."""
        import torch.distributed as dist

        own: Groups = {}
        self._axis_groups[_key(placement)] = own
        if all(placement.axes.get(axis, 1) == 1 for axis in MODEL):
            return
        for ranks in communicating_groups(placement.ranks, placement.axes):
            group = dist.new_group(list(ranks), timeout=COLLECTIVE_TIMEOUT)
            if self.world.rank in ranks:
                prove(self.world, group)
                own[ranks] = group

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
        if _key(placement) not in self._built:
            raise PlanError(f"placement '{placement.name}' was not made by this world's split")
        mesh, group = self._built[_key(placement)]
        shard_group = self._shard_groups.get(_key(placement))
        axis_groups = self._axis_groups[_key(placement)]
        return RoleContext(
            self.world,
            placement,
            mesh,
            group,
            self.neighbours,
            self.trace,
            shard_group,
            axis_groups,
            row_shards,
        )


def _key(placement: Placement) -> tuple[Any, ...]:
    return placement.ranks, tuple(placement.axes.items())


def _all_gather_bytes(blob: bytes, group: ProcessGroup, num_ranks: int) -> list[bytes]:
    """Return the `blob` of each rank of a group that has `num_ranks`."""
    import torch
    import torch.distributed as dist

    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(num_ranks)]
    dist.all_gather(sizes, torch.tensor([len(blob)]), group=group)
    longest = int(max(sizes))
    padded = torch.from_numpy(np.frombuffer(blob.ljust(longest, b"\0"), np.uint8).copy())
    gathered = [torch.empty(longest, dtype=torch.uint8) for _ in range(num_ranks)]
    dist.all_gather(gathered, padded, group=group)
    return [blob[: int(size)].numpy().tobytes() for blob, size in zip(gathered, sizes, strict=True)]


def _make_equally_many_groups(rank: int, group: ProcessGroup) -> None:
    """Have each rank of `group` make groups of itself until it has as many as the others.

    torch names a group that only some ranks make by the number of groups that a rank has. With
    different names, the ranks would wait for each other until the deadline.

    Ranks: all of `group`. Blocks: until each has called.
    """
    import torch
    import torch.distributed as dist

    names = dist.distributed_c10d._world.pg_names
    most = torch.tensor([len(names)], dtype=torch.int64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    for _ in range(int(most.item()) - len(names)):
        dist.new_group([rank], backend="gloo", use_local_synchronization=True)
