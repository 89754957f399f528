"""Link between two roles, which carries the weights of one to the other at every push."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spmd_rl.controller.capabilities import WeightProvider, WeightReceiver
from spmd_rl.controller.contracts import not_promised, record_contracts
from spmd_rl.controller.handle import Handle
from spmd_rl.controller.weight_sync import PlanSummary, RankLayouts, WeightSync
from spmd_rl.errors import ConfigError
from spmd_rl.mesh.split import Placement


@dataclass(frozen=True)
class PushStats:
    """Bytes, time and route of a push; a route is "alias", "copy", "buckets" or "copy+buckets"."""

    bytes_moved: int
    seconds: float
    route: str


class Link:
    """Two roles' weights, connected by one plan that every push replays."""

    def __init__(self, weight_sync: WeightSync, plan: PlanSummary) -> None:
        self._weight_sync = weight_sync
        self.plan = plan

    def push(self, version: int) -> PushStats:
        """Copy the source's weights to the destination, and commit them as `version` on every rank
        or on none.

        Blocks: until both ends are idle, then until every rank has committed; the run's deadline
        ends it.
        """
        began = time.monotonic()
        self._weight_sync.barrier.call()
        traffic = self._weight_sync.transfer.call()
        self._weight_sync.commit.call(version)
        copied = sum(rank.copied_bytes for rank in traffic)
        received = sum(rank.received_bytes for rank in traffic)
        routes = [name for name, size in (("copy", copied), ("buckets", received)) if size]
        return PushStats(copied + received, time.monotonic() - began, "+".join(routes) or "alias")


def link_placement(source: Handle, destination: Handle) -> Placement:
    """Return the placement of the link between two roles: the ranks of both.

    Raises: ConfigError when one of the roles has no weights to give, or to receive.
    """
    for handle, capability in ((source, WeightProvider), (destination, WeightReceiver)):
        if capability not in handle.capabilities:
            raise ConfigError(
                f"{source.name} cannot be linked to {destination.name}: "
                f"let the class of {handle.name} inherit from rl.{capability.__name__}"
            )
    ranks = tuple(sorted({*source.placement.ranks, *destination.placement.ranks}))
    axes = {"dp": len(ranks), "fsdp": 1, "tp": 1}
    return Placement(f"{source.name}->{destination.name}", ranks, axes)


def connect(
    weight_sync: WeightSync,
    placement: Placement,
    nodes: Mapping[int, int],
    run_folder: Path,
    exact: bool,
) -> Link:
    """Have the ranks of a link compare their numeric contracts and agree on the plan of its pushes.

    Raises: ContractError if they must be `exact` and could not have the same bits.
    """
    layouts = weight_sync.layouts.call()
    contracts = {
        f"{name} on rank {rank}": contract
        for rank, of_rank in zip(placement.ranks, layouts, strict=True)
        for name, contract in of_rank.contracts.items()
    }
    record_contracts(run_folder, placement.name, contracts, exact)
    if exact and (facts := not_promised(contracts)):
        print(f"{placement.name}: equal bits are not promised here: {facts}", flush=True)
    return Link(weight_sync, _prepare(weight_sync, layouts, nodes))


def _prepare(
    weight_sync: WeightSync, layouts: list[RankLayouts], nodes: Mapping[int, int]
) -> PlanSummary:
    sources = [of_rank.source for of_rank in layouts if of_rank.source is not None]
    destinations = [of_rank.destination for of_rank in layouts if of_rank.destination is not None]
    return weight_sync.prepare.call(sources, destinations, dict(nodes))
