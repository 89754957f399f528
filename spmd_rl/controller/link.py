"""A link carries one role's weights to another: one plan, replayed at every push."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spmd_rl.controller.contracts import agree, not_promised
from spmd_rl.controller.handle import Handle
from spmd_rl.controller.weight_sync import Ends, PlanSummary, WeightSync
from spmd_rl.mesh.split import Placement

if TYPE_CHECKING:
    from spmd_rl.controller.controller import Controller


@dataclass(frozen=True)
class PushStats:
    """What a push moved, in how long, and by which route: "alias", "copy", "buckets" or
    "copy+buckets".
    """

    bytes_moved: int
    seconds: float
    route: str


class Link:
    """Two roles' weights, connected. `plan` says what a push moves."""

    def __init__(self, bridge: WeightSync, plan: PlanSummary) -> None:
        self._bridge = bridge
        self.plan = plan

    def push(self, version: int) -> PushStats:
        """Bring the destination the source's weights and commit them as `version`, on all ranks or
        none.

        Blocks: until both ends are idle, then until every rank has committed; the run's deadline
        ends it.
        """
        began = time.monotonic()
        self._bridge.ready.call()
        moved = self._bridge.go.call()
        self._bridge.commit.call(version)
        copied = sum(rank.copied_bytes for rank in moved)
        received = sum(rank.received_bytes for rank in moved)
        route = (
            "+".join(name for name, size in (("copy", copied), ("buckets", received)) if size)
            or "alias"
        )
        return PushStats(copied + received, time.monotonic() - began, route)


def connect(ctl: Controller, source: Handle, destination: Handle, exact: bool, alias: bool) -> Link:
    """Spawn the bridge on the ranks of both roles and have it agree on the plan.

    Raises: ContractError if they must be `exact` and could not have the same bits.
    """
    ranks = tuple(sorted({*source.placement.ranks, *destination.placement.ranks}))
    union = Placement(
        f"{source.name}->{destination.name}", ranks, {"dp": len(ranks), "fsdp": 1, "tp": 1}
    )
    ctl.world.build([union])
    bridge = ctl.spawn(WeightSync, Ends(source.name, destination.name, alias), on=union)
    ends = bridge.layouts.call()
    parties = {
        f"{name} on rank {rank}": contract
        for rank, end in zip(ranks, ends, strict=True)
        for name, contract in end.contracts.items()
    }
    agree(ctl.run_folder, union.name, parties, exact)
    if exact and (weak := not_promised(parties)):
        print(f"{union.name}: equal bits are not promised here: {weak}", flush=True)
    plan = bridge.prepare.call(
        [end.source for end in ends if end.source is not None],
        [end.destination for end in ends if end.destination is not None],
        ctl.world.nodes(),
    )
    return Link(bridge, plan)
