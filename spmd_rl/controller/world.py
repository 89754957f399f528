"""ControllerWorld: the ranks of the run, as the controller sees them."""

from __future__ import annotations

from typing import Any

from spmd_rl.controller.channel.codec import NOTHING, Codec
from spmd_rl.controller.channel.messages import BuildMeshes, encode
from spmd_rl.controller.lifecycle.dispatcher import Dispatcher
from spmd_rl.mesh.split import Placement, Placements, plan_split

_SEES = Codec(bool)


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
        dispatcher = self._dispatcher
        record = dispatcher.calls.open("world.split", tuple(range(self.size)))
        shared = dispatcher.shared
        folder = str(shared.folder) if shared is not None else ""
        header = encode(BuildMeshes(placements, dispatcher.traces, folder))
        dispatcher.issue(record, header, [(record.ranks, NOTHING)])
        answers = dispatcher.collect(record).values()
        sees = [_SEES.unpack(answer) for answer in answers]
        if shared is not None and not all(sees):  # a worker may be in a container of its own
            shared.close()
            dispatcher.shared = None
