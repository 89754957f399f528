"""ControllerWorld: the ranks of the run, as the controller sees them."""

from __future__ import annotations

from typing import Any

from spmd_rl.controller.channel.codec import NOTHING
from spmd_rl.controller.channel.wire import BuildMeshes, encode
from spmd_rl.controller.lifecycle.dispatcher import Dispatcher
from spmd_rl.mesh.split import Placement, Placements, plan_split


class ControllerWorld:
    """The ranks of the run. A recipe splits them among its roles."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.size = dispatcher.roster.world_size

    def split(self, split: Any) -> Placements:
        """Place the roles that `split` (a dataclass or mapping of RoleSplit) names, and build their
        meshes.

        Blocks: until every rank of the world has built them.
        Raises: PlanError when they do not fit.
        """
        placements = plan_split(split, self.size)
        self.build(list(placements.values()))
        return placements

    def nodes(self) -> dict[int, int]:
        """Return the number of each rank's host, by rank."""
        workers = self._dispatcher.roster.workers
        hosts = {rank: worker.hello.host for rank, worker in sorted(workers.items())}
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts.values()))}
        return {rank: numbers[host] for rank, host in hosts.items()}

    def build(self, placements: list[Placement]) -> None:
        """Build the meshes of `placements` on every rank of the world.

        Blocks: until every rank of the world has built them.
        """
        record = self._dispatcher.calls.open("world.split", tuple(range(self.size)))
        header = encode(BuildMeshes(placements, self._dispatcher.traces))
        self._dispatcher.issue(record, header, [(record.ranks, NOTHING)])
        self._dispatcher.collect(record)
