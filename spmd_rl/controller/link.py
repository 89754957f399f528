"""A link carries one role's weights to another: one plan, replayed at every push."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmd_rl.controller.bridge import Bridge, Contract, Ends, PlanSummary
from spmd_rl.controller.handle import Handle
from spmd_rl.errors import ContractError
from spmd_rl.mesh.split import Placement
from spmd_rl.observe.run import write_whole

if TYPE_CHECKING:
    from spmd_rl.controller.controller import Controller

CONTRACTS = "contract.json"
NO = "no promise"  # in a fact of a contract


@dataclass(frozen=True)
class PushStats:
    """What a push moved, in how long, and by which route: "alias", "copy", "buckets" or "copy+buckets"."""

    bytes_moved: int
    seconds: float
    route: str


class Link:
    """Two roles' weights, connected. `plan` says what a push moves."""

    def __init__(self, bridge: Bridge, plan: PlanSummary) -> None:
        self._bridge = bridge
        self.plan = plan

    def push(self, version: int) -> PushStats:
        """Bring the destination the source's weights and commit them as `version`, on all ranks or none.

        Blocks: until both ends are idle, then until every rank has committed; the run's deadline ends it.
        """
        began = time.monotonic()
        self._bridge.ready.call()
        moved = self._bridge.go.call()
        self._bridge.commit.call(version)
        copied = sum(rank.copied_bytes for rank in moved)
        received = sum(rank.received_bytes for rank in moved)
        route = "+".join(name for name, size in (("copy", copied), ("buckets", received)) if size) or "alias"
        return PushStats(copied + received, time.monotonic() - began, route)


def disagreement(contracts: Mapping[str, Contract]) -> str:
    """How the numeric contracts of named parties differ, as a clause; empty when all are the same."""
    parties = iter(contracts.items())
    first, expected = next(parties, ("", {}))
    for name, contract in parties:
        keys = [key for key in {**expected, **contract} if expected.get(key) != contract.get(key)]
        if keys:
            facts = "; ".join(f"{key} is {expected.get(key)!r} here and {contract.get(key)!r} there" for key in keys)
            return f"{first} and {name} follow different numeric contracts: {facts}"
    return ""


def not_promised(contracts: Mapping[str, Contract]) -> str:
    """Where a contract of equal bits promises none, as a clause; empty where all of it holds."""
    weak = {f"{key} is {value!r}" for facts in contracts.values() for key, value in facts.items() if NO in str(value)}
    return "; ".join(sorted(weak))


def followed(contracts: Mapping[str, Contract]) -> list[dict[str, Any]]:
    """Each contract that is followed: its digest, by whom, and its facts."""
    found: dict[str, dict[str, Any]] = {}
    for name, facts in contracts.items():
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        found.setdefault(digest, {"digest": digest, "by": [], "facts": facts})["by"].append(name)
    return list(found.values())


def _keep(path: Path, link: str, contracts: Mapping[str, Contract]) -> None:
    links = json.loads(path.read_text()) if path.exists() else {}
    write_whole(path, json.dumps(links | {link: followed(contracts)}, indent=1) + "\n")


def connect(ctl: Controller, source: Handle, destination: Handle, exact: bool) -> Link:
    """Spawn the bridge on the ranks of both roles and have it agree on the plan.

    Raises: ContractError if they must be `exact` and could not have the same bits.
    """
    ranks = tuple(sorted({*source.placement.ranks, *destination.placement.ranks}))
    union = Placement(f"{source.name}->{destination.name}", ranks, {"dp": len(ranks), "fsdp": 1, "tp": 1})
    ctl.world.build([union])
    bridge = ctl.spawn(Bridge, Ends(source.name, destination.name), on=union)
    ends = bridge.layouts.call()
    parties = {
        f"{name} on rank {rank}": contract
        for rank, end in zip(ranks, ends, strict=True)
        for name, contract in end.contracts.items()
    }
    if exact and (clause := disagreement(parties)):
        raise ContractError(f"{clause} (run.exact = false lets them)")
    if exact and (weak := not_promised(parties)):
        print(f"{union.name}: equal bits are not promised here: {weak}", flush=True)
    _keep(ctl.run_folder / CONTRACTS, union.name, parties)
    plan = bridge.prepare.call(
        [end.source for end in ends if end.source is not None],
        [end.destination for end in ends if end.destination is not None],
        ctl.world.nodes(),
    )
    return Link(bridge, plan)
