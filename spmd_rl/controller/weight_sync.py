"""The role behind a link: on every rank of either end, it plans and carries out weight pushes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spmd_rl.controller.contracts import Contract
from spmd_rl.controller.endpoint import Role, Sharded, collective
from spmd_rl.errors import ContractError
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.weights.layout import Layout
from spmd_rl.weights.plan import plan

if TYPE_CHECKING:
    from spmd_rl.weights.local_tensors import LocalTensors
    from spmd_rl.weights.plan import Plan


@dataclass(frozen=True)
class Ends:
    """The names of the two roles, and whether they may share memory."""

    source: str
    destination: str
    alias: bool


@dataclass(frozen=True)
class EndLayouts:
    """What one rank holds as source and as destination, where it is either, and the numeric
    contracts it follows.
    """

    source: Layout | None
    destination: Layout | None
    contracts: dict[str, Contract]


@dataclass(frozen=True)
class PlanSummary:
    """What all ranks must agree on before the first byte moves."""

    digest: str
    local_bytes: int
    wire_bytes: int


@dataclass(frozen=True)
class Moved:
    """Bytes of one push on one rank."""

    aliased_bytes: int
    copied_bytes: int
    received_bytes: int


class WeightSync(Role):
    """One rank's part in a link. The destination's `on_weights` runs only after every rank has its
    bytes.
    """

    def __init__(self, cfg: Ends, context: RoleContext) -> None:
        super().__init__(cfg, context)
        self._destination: Any = context.neighbour(cfg.destination)
        self._source: Any = context.neighbour(cfg.source)
        self._src = _held(self._source, "weight_source")
        self._dst = _held(self._destination, "weight_sink")
        self._plan: Plan | None = None

    @collective
    def layouts(self) -> Sharded[list[EndLayouts]]:
        """What this rank holds."""
        rank = self.context.world.rank
        source, destination = (
            None if held is None else held.layout(rank) for held in (self._src, self._dst)
        )
        ends = {self.cfg.source: self._source, self.cfg.destination: self._destination}
        follow = {
            name: role.numeric_contract()
            for name, role in ends.items()
            if hasattr(role, "numeric_contract")
        }
        return [EndLayouts(source, destination, follow)]

    @collective
    def prepare(self, src: list[Layout], dst: list[Layout], nodes: dict[int, int]) -> PlanSummary:
        """Make the plan, and share storage where both ends of this process hold the same box.

        That asks of the source that it says when it is about to change: until the next push the
        destination is then outdated, as it would be with memory of its own.
        """
        from spmd_rl.weights.executors import alias

        self._plan = plan(src, dst, nodes, self.context.world.rank)
        ours, theirs = self._dst, self._src
        told = hasattr(self._source, "before_change") and hasattr(self._destination, "outdate")
        if (
            self.cfg.alias
            and told
            and ours is not None
            and theirs is not None
            and alias(ours, theirs)
        ):
            self._source.before_change(self._destination.outdate)
        return PlanSummary(self._plan.digest, self._plan.local_bytes, self._plan.wire_bytes)

    @collective
    def ready(self) -> None:
        """Answered once this rank is done with all that was issued before, so that nobody waits
        inside `go`.
        """

    @collective
    def go(self) -> Sharded[list[Moved]]:
        """Carry out the plan."""
        from spmd_rl.weights.executors import execute

        if self._plan is None:
            raise ContractError("a push before its plan")
        traffic = execute(
            self._plan, self.context.world.rank, self._src, self._dst, self.context.group
        )
        return [Moved(traffic.aliased_bytes, traffic.copied_bytes, traffic.received_bytes)]

    @collective
    def commit(self, version: int) -> None:
        """Let the destination use what has arrived, as `version`, and let the source know the name
        of what it gave.
        """
        if hasattr(self._source, "on_pushed"):
            self._source.on_pushed(version)
        if self._destination is not None:
            self._destination.on_weights(version)


def _held(role: Any, method: str) -> LocalTensors | None:
    return None if role is None else getattr(role, method)()
