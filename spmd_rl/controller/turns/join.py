"""Turns of a role's rank, if its ranks take some, and which commands they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmd_rl.controller.channel.dealer import ReceivedCommand
from spmd_rl.controller.channel.messages import Abort, Call, CallBeside, Spawn
from spmd_rl.controller.endpoint import Signature, endpoints
from spmd_rl.controller.turns.shard_turns import ShardTurns
from spmd_rl.controller.turns.step_turns import StepTurns
from spmd_rl.mesh.role_context import RoleContext

STEP_AXES = ("ep",)  # ranks along these step together, each with requests of its own


def shard_turns(
    name: str, context: RoleContext, roles: Mapping[str, Any]
) -> ShardTurns[ReceivedCommand] | None:
    """Return the turns in which the ranks of this role's shard run commands, if there are several
    ranks. `roles` are those of this rank, by name; more of them may come.
    """
    if context.shard_size == 1:
        return None
    ranks = context.placement.shard_ranks(context.world.rank)
    shared = SharedCommands(name, frozenset(ranks), roles)

    def is_shared(received: ReceivedCommand) -> bool:
        return isinstance(received[0], Abort) or shared.has(received)

    return ShardTurns(context.shard_rank == 0, context.broadcast_in_shard, is_shared)


def step_turns(
    name: str, context: RoleContext, roles: Mapping[str, Any]
) -> StepTurns[ReceivedCommand] | None:
    """Return the turns of the ranks that step together with this one, if there are others.

    `roles` are those of this rank, by name; more of them may come.
    """
    ranks = context.placement.ranks_along(context.world.rank, STEP_AXES)
    if len(ranks) == 1:
        return None
    shared = SharedCommands(name, frozenset(ranks), roles)
    return StepTurns(
        lambda numbers: context.all_gather_numbers(numbers, STEP_AXES),
        shared.has,
        shared.may_open,
    )


class SharedCommands:
    """The commands that go to all `ranks` of the role `name` that take turns together."""

    def __init__(self, name: str, ranks: frozenset[int], roles: Mapping[str, Any]) -> None:
        self._name = name
        self._ranks = ranks
        self._roles = roles
        self._deferred: dict[str, bool] = {}  # by endpoint of the role

    def has(self, received: ReceivedCommand) -> bool:
        """Whether each of the ranks gets this command, or a `CallBeside` for it."""
        command = received[0]
        if isinstance(command, Abort):
            return False
        if isinstance(command, Spawn):
            return self._ranks.issubset(command.placement.ranks)
        if not isinstance(command, Call):
            return True
        role = self._roles[command.name]
        endpoint = endpoints(type(role))[command.endpoint]
        if endpoint.route is not None:
            return command.name == self._name
        return not endpoint.local and self._ranks.issubset(role.context.placement.ranks)

    def may_open(self, received: ReceivedCommand) -> bool:
        """Whether this command may leave a call of the role unanswered on one of the ranks."""
        command = received[0]
        if isinstance(command, CallBeside):
            return True
        if not isinstance(command, Call) or command.name != self._name:
            return False
        if command.endpoint not in self._deferred:
            endpoint = endpoints(type(self._roles[self._name]))[command.endpoint]
            self._deferred[command.endpoint] = Signature(endpoint).is_deferred
        return self._deferred[command.endpoint]
