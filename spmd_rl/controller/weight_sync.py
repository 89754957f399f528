"""WeightSync: the role behind a link, which plans and carries out weight pushes on every rank of
both ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from spmd_rl.controller.capabilities import Contracted, WeightProvider, WeightReceiver
from spmd_rl.controller.contracts import Contract
from spmd_rl.controller.endpoint import Role, Sharded, collective, concurrent
from spmd_rl.errors import ContractError
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.weights.ends import LocalEnds
from spmd_rl.weights.plan.layout_rules import LayoutRules, compressed
from spmd_rl.weights.plan.moves import Traffic, plan_moves
from spmd_rl.weights.proof.verdict import Verification

if TYPE_CHECKING:
    from spmd_rl.weights.executors import Executor
    from spmd_rl.weights.plan.moves import WeightPlan
    from spmd_rl.weights.proof.verification import Verifier


@dataclass(frozen=True)
class WeightSyncConfig:
    """The names of the two roles, and whether they may share memory."""

    source: str
    destination: str
    alias: bool


@dataclass(frozen=True)
class RankLayouts:
    """One rank's layouts as source and as destination, where it is either, and the numeric
    contracts of its roles by role name.
    """

    source: LayoutRules | None
    destination: LayoutRules | None
    contracts: dict[str, Contract]


@dataclass(frozen=True)
class PlanSummary:
    """The facts of a plan that all ranks must agree on before the first byte moves."""

    digest: str
    local_bytes: int
    wire_bytes: int


@dataclass(frozen=True)
class RankPush:
    """What one rank did in a push."""

    traffic: Traffic
    verification: Verification | None


class WeightSync(Role):
    """One rank's part in a link between two roles, of which it serves one or both."""

    def __init__(self, cfg: WeightSyncConfig, context: RoleContext) -> None:
        super().__init__(cfg, context)
        self._provider = cast(WeightProvider | None, context.neighbour(cfg.source))
        self._receiver = cast(WeightReceiver | None, context.neighbour(cfg.destination))
        self._ends = LocalEnds(
            context.world.rank,
            None if self._provider is None else self._provider.weight_source(),
            None if self._receiver is None else self._receiver.weight_sink(),
            context.device,
        )
        self._plan: WeightPlan | None = None
        self._executor: Executor | None = None
        self._verifier: Verifier | None = None

    @collective
    def layouts(self) -> Sharded[list[RankLayouts]]:
        """Return the layouts and numeric contracts of this rank."""
        ends = self._ends
        source, destination = (
            None if end is None else compressed(end.layout(ends.rank))
            for end in (ends.source, ends.sink)
        )
        roles: dict[str, object] = {
            self.cfg.source: self._provider,
            self.cfg.destination: self._receiver,
        }
        contracts = {
            name: role.numeric_contract()
            for name, role in roles.items()
            if isinstance(role, Contracted)
        }
        return [RankLayouts(source, destination, contracts)]

    @collective
    def prepare(self, layouts: list[RankLayouts], nodes: dict[int, int]) -> PlanSummary:
        """Plan the pushes, and share memory where both ends of this process hold the same box.

        A destination that shares memory is stale from each change of the source to the next push,
        as it would be with memory of its own.
        """
        from spmd_rl.weights.executors import alias

        ends = self._ends
        self._plan = _plan_of(layouts, nodes, ends.rank)
        if self.cfg.alias and ends.source is not None and ends.sink is not None:
            self._ends = replace(ends, shared=alias(ends.source, ends.sink, ends.rank))
        if self._ends.shared and self._provider is not None:
            self._provider.call_before_change(self._ends.the_sink().outdate)
        return PlanSummary(self._plan.digest, self._plan.local_bytes, self._plan.wire_bytes)

    @collective
    def barrier(self) -> None:
        """Answer once this rank has finished its earlier calls, so that nobody waits for it inside
        `transfer`.
        """

    @collective
    def transfer(self, verify: bool) -> Sharded[list[RankPush]]:
        """Carry out the plan and, with `verify`, compare what arrived with the sources."""
        from spmd_rl.weights.executors import Executor
        from spmd_rl.weights.proof.verification import Verifier

        plan, ends, group = self._planned(), self._ends, self.context.group
        if ends.source is not None:
            ends.source.open()
        if ends.sink is not None:
            ends.sink.open()
        self._executor = self._executor or Executor(plan.moves, ends, plan.bucket_bytes)
        traffic = self._executor.run(group)
        if not verify:
            return [RankPush(traffic, None)]
        self._verifier = self._verifier or Verifier(plan.moves, plan.replicas, ends)
        return [RankPush(traffic, self._verifier.compare(group))]

    @concurrent
    @collective
    def transfer_one(self, name: str, perturb: bool) -> Sharded[list[RankPush]]:
        """Carry out the moves of one tensor, and compare. With `perturb`, other bits are sent."""
        from spmd_rl.weights.executors import execute
        from spmd_rl.weights.proof.perturbed_source import PerturbedSource
        from spmd_rl.weights.proof.verification import Verifier

        plan, ends = self._planned(), self._ends
        moves = [move for move in plan.moves if move.name == name]
        sent = ends
        if perturb and ends.source is not None:
            sent = replace(ends, source=PerturbedSource(ends.source))
        traffic = execute(moves, sent, self.context.group, plan.bucket_bytes)
        return [RankPush(traffic, Verifier(moves, (), ends).compare(self.context.group))]

    @concurrent
    @collective
    def commit(self, version: int) -> None:
        """Let both ends call the pushed weights `version`, now that every rank has its bytes."""
        if self._provider is not None:
            self._provider.on_weights_pushed(version)
        if self._ends.sink is not None:
            self._ends.sink.commit(version)

    def _planned(self) -> WeightPlan:
        if self._plan is None:
            raise ContractError("weights cannot be transferred before `prepare` has planned it")
        return self._plan


def _plan_of(layouts: list[RankLayouts], nodes: dict[int, int], rank: int) -> WeightPlan:
    """Return the plan of `rank` for pushes between all ranks of these layouts."""
    sources = [ends.source for ends in layouts if ends.source is not None]
    destinations = [ends.destination for ends in layouts if ends.destination is not None]
    return plan_moves(sources, destinations, nodes, rank)
