"""Worker: one torchrun rank, whose main thread runs the controller's commands in order."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from spmd_rl.controller.capabilities import Contracted, InTurns, Pumped
from spmd_rl.controller.channel.codec import NOTHING, Packed, pack
from spmd_rl.controller.channel.dealer import Answer, Dealer, ReceivedCommand
from spmd_rl.controller.channel.import_names import resolve
from spmd_rl.controller.channel.leader_followers import TICK_S
from spmd_rl.controller.channel.messages import (
    Abort,
    BuildMeshes,
    Call,
    CallBeside,
    Command,
    CommandResult,
    Spawn,
    Stop,
    encode,
)
from spmd_rl.controller.channel.shared_arrays import SharedArrays
from spmd_rl.controller.constructor import Constructor
from spmd_rl.controller.deferred import Deferred
from spmd_rl.controller.lifecycle.error_messages import failure_of
from spmd_rl.controller.lifecycle.worker_lifecycle import WorkerLifecycle
from spmd_rl.controller.live_counts import sum_counts
from spmd_rl.controller.running_calls import DeferredCall, LocalEndpoint, RunningCalls, bind
from spmd_rl.controller.turns.join import shard_turns, step_turns
from spmd_rl.controller.turns.shard_turns import LostTurnError, ShardTurns
from spmd_rl.controller.turns.step_turns import StepTurns
from spmd_rl.errors import ContractError
from spmd_rl.mesh.role_context import Meshes
from spmd_rl.observe.trace import Trace, now_ns

_RESULT = encode(CommandResult())


class Worker:
    """The roles of one rank, by name."""

    def __init__(self, meshes: Meshes) -> None:
        self._meshes = meshes
        self._pid = os.getpid()
        self._trace = Trace()
        self._roles = meshes.neighbours
        self._pumped: dict[str, Pumped] = {}
        self._pumps: dict[str, Callable[[], None]] = {}
        self._endpoints: dict[tuple[str, str], LocalEndpoint] = {}
        self._running = RunningCalls[ReceivedCommand](_is_concurrent)
        self._answers: list[Answer] = []  # not sent yet
        self._shared: SharedArrays | None = None
        # of a role whose ranks share their calls, or step together
        self._shard: ShardTurns[ReceivedCommand] | None = None
        self._steps: StepTurns[ReceivedCommand] | None = None

    def _live_counts(self) -> dict[str, int]:
        """Return what the roles count. The thread that answers pings calls it."""
        return sum_counts(role.live_counts() for role in list(self._roles.values()))

    def serve(self, lifecycle: WorkerLifecycle) -> None:
        """Run commands until the controller says stop, and pump roles that have work between them.

        Blocks: between commands, on the controller; the process ends if the controller is lost.
        """
        lifecycle.on_idle = lambda: self._trace.flush()
        lifecycle.counts = self._live_counts
        dealer = lifecycle.dealer
        while True:
            for received in self._next_turn(dealer):
                # isinstance takes ten times as long on a msgspec type
                if type(received[0]) is Stop:
                    self._run_ready()
                    self._trace.close()
                    return
                if type(received[0]) is Abort:
                    self._running.abort(received[2])
                else:
                    self._running.add(received)
            self._run_ready()
            self._pump()

    def _next_turn(self, dealer: Dealer) -> list[ReceivedCommand]:
        """Return the commands to run now. Turns and calls fail where a rank of them has died."""
        try:
            if self._steps is not None:
                return self._next_step_turn(dealer, self._steps)
            return self._next_shard_turn(dealer, self._shard)
        except LostTurnError as lost:  # this rank lives on until the controller says who is gone
            self._shard = None
            self._running.stop_sharing(lost.__cause__ or lost)
            return []

    def _next_shard_turn(
        self, dealer: Dealer, shard: ShardTurns[ReceivedCommand] | None
    ) -> list[ReceivedCommand]:
        """Return the commands to run now; a shard's first rank decides while calls run."""
        if shard is None or not (self._running.num_unanswered or shard.has_untold):
            return (shard.take_early() if shard else []) or self._next(dealer)
        if not shard.is_first:
            return shard.follow(partial(self._receive, dealer), self._running.release)
        commands = [] if shard.has_untold else self._next(dealer)
        shard.lead(commands)
        return commands

    def _next_step_turn(
        self, dealer: Dealer, turns: StepTurns[ReceivedCommand]
    ) -> list[ReceivedCommand]:
        """Begin a turn of the ranks that step together with this one."""
        running, roles = self._running, self._pumped.values()

        def receive(seconds: float | None) -> list[ReceivedCommand]:
            if seconds is None:
                return self._receive(dealer, True)
            watched = [fd for role in roles for fd in role.watched()]
            return self._receive(dealer, seconds > 0, watched, seconds)

        has_work = any(role.has_work() for role in roles)
        commands = turns.next(receive, running.num_unanswered, has_work)
        running.is_held_by_others = turns.is_open
        return commands

    def _next(self, dealer: Dealer) -> list[ReceivedCommand]:
        """Send the answers, and return the next command; all that are here if there is work: of a
        role, or a command that was held back until now.
        """
        if not self._running.num_unanswered:
            return self._receive(dealer, not self._running.num_held)
        roles = self._pumped.values()
        if any(role.has_work() for role in roles):
            return self._receive(dealer, False)
        return self._receive(dealer, True, [fd for role in roles for fd in role.watched()])

    def _receive(
        self, dealer: Dealer, wait: bool, watched: Sequence[int] = (), seconds: float = TICK_S
    ) -> list[ReceivedCommand]:
        received = dealer.next(self._answers, wait=wait, watched=watched, seconds=seconds)
        self._answers.clear()
        return received

    def _run_ready(self) -> None:
        for ready in self._running.ready():
            if self._steps is not None:
                self._running.is_held_by_others = self._steps.start(ready)
            if type(ready[0]) is not CallBeside:
                self._run(*ready)

    def _run(self, command: Command | Stop, value: Packed, number: int) -> None:
        """Run a command, and keep its answer to be sent, unless it comes later."""
        header = _RESULT
        try:
            result = self._returned(command, value, number)
            if result is None:
                return
        # User code may raise anything: the controller decides what that ends.
        except BaseException as error:
            if os.getpid() != self._pid:  # raised in a process that user code forked
                raise
            header, result = encode(failure_of(error)), NOTHING
        if os.getpid() != self._pid:  # a forked process returned from the user's function
            os._exit(0)
        self._answers.append((header, result, number))

    def _pump(self) -> None:
        """Give each role one turn, while a call is unanswered."""
        if not (self._running.num_unanswered or self._running.is_held_by_others):
            return
        for name, pump in self._pumps.items():
            try:
                pump()
            # the controller decides what an error of a role ends
            except BaseException as error:
                if os.getpid() != self._pid:
                    raise
                self._running.fail(name, error)

    def _call(self, call: Call, value: Packed, number: int) -> Packed | None:
        """Run an endpoint, and return its packed value; None if its answer comes later."""
        key = call.name, call.endpoint
        endpoint = self._endpoints.get(key)
        if endpoint is None:
            endpoint = self._endpoints[key] = bind(call.name, self._roles[call.name], call.endpoint)
        began_ns = now_ns() if self._trace.on else 0
        result = None
        try:
            try:
                arguments = endpoint.signature.arguments.unpack(value, self._shared)
            except ContractError as error:
                call_text = f"{endpoint.name}({', '.join(endpoint.signature.names)})"
                raise ContractError(f"{call_text}: {error}") from error
            result = endpoint.method(*arguments)
            if type(result) is Deferred:
                self._defer(call, endpoint, number, result, began_ns)
                return None
            return endpoint.pack(result, self._shared)
        finally:
            if type(result) is not Deferred:
                self._trace_call(call, endpoint, number, began_ns)

    def _defer(
        self,
        call: Call,
        endpoint: LocalEndpoint,
        number: int,
        deferred: Deferred[Any],
        began_ns: int,
    ) -> None:
        def answer(deferred: Deferred[Any]) -> None:
            header, result = _RESULT, NOTHING
            try:
                if deferred.error is not None:
                    raise deferred.error
                result = endpoint.pack(deferred.value, self._shared)
            except BaseException as error:  # noqa: BLE001  of any kind, as where a command runs
                header = encode(failure_of(error))
            self._answers.append((header, result, number))
            if self._shard is not None:
                self._shard.note_answered(number)
            self._trace_call(call, endpoint, number, began_ns)

        self._running.defer(DeferredCall(call.name, number, deferred, answer))

    def _trace_call(self, call: Call, endpoint: LocalEndpoint, number: int, began_ns: int) -> None:
        if self._trace.on:
            self._trace.add(
                endpoint.name, began_ns, now_ns(), role=call.name, phase=call.phase, call=number
            )

    def _returned(self, command: Command | Stop, value: Packed, number: int) -> Packed | None:
        """Run a command, and return its packed value; None if its answer comes later."""
        if type(command) is Call:
            return self._call(command, value, number)
        if isinstance(command, Spawn):
            return self._build_role(command, value)
        assert isinstance(command, BuildMeshes)
        return pack(self._build_meshes(command))

    def _build_role(self, command: Spawn, value: Packed) -> Packed:
        """Build a role, and return its numeric contract if it has one."""
        role_type = resolve(command.role)
        constructor = Constructor(role_type)
        config, *settings = constructor.codec(resolve(command.cfg_type)).unpack(value)
        context = self._meshes.context(command.placement, command.row_shards)
        keywords = dict(zip(constructor.names, settings, strict=True))
        role = self._roles[command.name] = role_type(config, context, **keywords)
        if isinstance(role, Pumped):
            self._join_turns(command.name, role)
        gc.collect()
        # Roles and their modules stay, so that a full collection need not look through them.
        gc.freeze()
        return pack(role.numeric_contract() if isinstance(role, Contracted) else None)

    def _join_turns(self, name: str, role: Pumped) -> None:
        """Have the ranks of a role take turns together, if they do."""
        self._pumped[name], self._pumps[name] = role, role.pump
        context = self._roles[name].context
        if (shard := shard_turns(name, context, self._roles)) is not None:
            self._shard, self._running.holds_answers = shard, not shard.is_first
            if isinstance(role, InTurns):
                self._pumps[name] = partial(role.pump_in_shard, shard)
        if isinstance(role, InTurns) and (steps := step_turns(name, context, self._roles)):
            self._steps, self._pumps[name] = steps, lambda: role.pump_in_step(steps.steps)

    def _build_meshes(self, command: BuildMeshes) -> bool:
        """Build meshes, and begin this rank's trace if the run is traced.

        Returns whether this rank sees the arrays that the processes of its host share.
        """
        if command.traces and not self._trace.on:
            rank = self._meshes.world.rank
            self._trace = self._meshes.trace = Trace(
                Path(command.traces), f"rank {rank}", rank=rank
            )
        self._meshes.build(command.placements)
        folder = Path(command.shared)
        if command.shared and self._shared is None and folder.is_dir():
            self._shared = SharedArrays(folder, f"rank{self._meshes.world.rank}")
        return self._shared is not None


def _is_concurrent(received: ReceivedCommand) -> bool:
    """Whether a command may start while earlier calls are unanswered."""
    command = received[0]
    return isinstance(command, Call | CallBeside) and command.concurrent
