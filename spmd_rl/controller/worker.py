"""Worker: one torchrun rank, whose main thread runs the controller's commands in order."""

from __future__ import annotations

import gc
import os
import signal
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from spmd_rl.controller.capabilities import Contracted, Pumped
from spmd_rl.controller.channel import secret
from spmd_rl.controller.channel.address import Address
from spmd_rl.controller.channel.codec import NOTHING, Packed, pack
from spmd_rl.controller.channel.dealer import Answer, Dealer, ReceivedCommand
from spmd_rl.controller.channel.import_names import resolve
from spmd_rl.controller.channel.messages import (
    Abort,
    BuildMeshes,
    Bye,
    Call,
    Command,
    CommandResult,
    Hello,
    Spawn,
    Stop,
    encode,
)
from spmd_rl.controller.channel.shared_arrays import SharedArrays
from spmd_rl.controller.constructor import Constructor
from spmd_rl.controller.deferred import Deferred
from spmd_rl.controller.lifecycle.controller_process import ControllerProcess
from spmd_rl.controller.lifecycle.error_messages import failure_of
from spmd_rl.controller.lifecycle.worker_lifecycle import WorkerLifecycle
from spmd_rl.controller.live_counts import sum_counts
from spmd_rl.controller.local_endpoint import LocalEndpoint, bind
from spmd_rl.controller.run.checkpoints import Checkpoints
from spmd_rl.controller.running_calls import DeferredCall, RunningCalls
from spmd_rl.controller.shard_turns import ShardTurns
from spmd_rl.errors import ContractError, DeadlineError, SpmdError
from spmd_rl.mesh.connection_proof import prove
from spmd_rl.mesh.role_context import Meshes, RoleContext
from spmd_rl.mesh.world import World, join, open_store
from spmd_rl.observe.trace import Trace, now_ns

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ENDPOINT_KEY = "spmd_rl/endpoint"
_RESULT = encode(CommandResult())


class Worker:
    """The roles of one rank, by name."""

    def __init__(self, meshes: Meshes) -> None:
        self._meshes = meshes
        self._pid = os.getpid()
        self._trace = Trace()
        self._roles = meshes.neighbours
        self._pumped: dict[str, Pumped] = {}
        self._endpoints: dict[tuple[str, str], LocalEndpoint] = {}
        self._running = RunningCalls[ReceivedCommand](_is_concurrent)
        self._answers: list[Answer] = []  # not sent yet
        self._shared: SharedArrays | None = None
        self._shard: ShardTurns[ReceivedCommand] | None = None  # of a role, if it has several ranks

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
        """Return the commands to run now. In a shard of several ranks, its first rank decides while
        a call is unanswered.
        """
        shard = self._shard
        if shard is None or not (self._running.num_unanswered or shard.has_untold):
            return (shard.take_early() if shard else []) or self._next(dealer)
        if not shard.is_first:
            return shard.follow(partial(self._receive, dealer), self._running.release)
        commands = [] if shard.has_untold else self._next(dealer)
        shard.lead(commands)
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
        self, dealer: Dealer, wait: bool, watched: Sequence[int] = ()
    ) -> list[ReceivedCommand]:
        received = dealer.next(self._answers, wait=wait, watched=watched)
        self._answers.clear()
        return received

    def _run_ready(self) -> None:
        for ready in self._running.ready():
            self._run(*ready)

    def _run(self, command: Command | Stop, value: Packed, number: int) -> None:
        """Run a command, and keep its answer to be sent, unless it comes later."""
        header, result = _RESULT, NOTHING
        try:
            if type(command) is Call:
                called = self._call(command, value, number)
                if called is None:
                    return
                result = called
            else:
                assert isinstance(command, Command)
                result = self._build(command, value)
        # User code may raise anything: the controller decides what that ends.
        except BaseException as error:
            if os.getpid() != self._pid:  # raised in a process that user code forked
                raise
            header = encode(failure_of(error))
        if os.getpid() != self._pid:  # a forked process returned from the user's function
            os._exit(0)
        self._answers.append((header, result, number))

    def _pump(self) -> None:
        """Give each role one turn, while a call is unanswered."""
        if not self._running.num_unanswered:
            return
        for name, role in self._pumped.items():
            try:
                role.pump()
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
        is_deferred = False
        try:
            try:
                arguments = endpoint.arguments.unpack(value, self._shared)
            except ContractError as error:
                call_text = f"{endpoint.name}({', '.join(endpoint.parameters)})"
                raise ContractError(f"{call_text}: {error}") from error
            result = endpoint.method(*arguments)
            if is_deferred := type(result) is Deferred:
                self._defer(call, endpoint, number, result, began_ns)
                return None
            return endpoint.pack(result, self._shared)
        finally:
            if not is_deferred:
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

    def _build(self, command: Command, value: Packed) -> Packed:
        """Build a role or meshes, as the command says."""
        if isinstance(command, Spawn):
            return self._build_role(command, value)
        if isinstance(command, BuildMeshes):
            return pack(self._build_meshes(command))
        return NOTHING

    def _build_role(self, command: Spawn, value: Packed) -> Packed:
        """Build a role, and return its numeric contract if it has one."""
        role_type = resolve(command.role)
        constructor = Constructor(role_type)
        config, *settings = constructor.codec(resolve(command.cfg_type)).unpack(value)
        context = self._meshes.context(command.placement)
        keywords = dict(zip(constructor.names, settings, strict=True))
        role = self._roles[command.name] = role_type(config, context, **keywords)
        if isinstance(role, Pumped):
            self._pumped[command.name] = role
            self._join_shard(command.name, context)
        gc.collect()
        # Roles and their modules stay, so that a full collection need not look through them.
        gc.freeze()
        return pack(role.numeric_contract() if isinstance(role, Contracted) else None)

    def _join_shard(self, name: str, context: RoleContext) -> None:
        """Have the ranks of this role's shard take turns together, if there are several."""
        if context.shard_size == 1:
            return

        def is_shared(received: ReceivedCommand) -> bool:
            command = received[0]
            return type(command) is not Call or command.name == name

        is_first = context.shard_rank == 0
        self._shard = ShardTurns(is_first, context.broadcast_in_shard, is_shared)
        self._running.holds_answers = not is_first

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
    return type(command) is Call and command.concurrent


def run_worker(world: World, controller: ControllerProcess | None) -> int:
    """Run one rank from joining the world to its exit code. On rank 0, `controller` is the process
    that it started.

    Blocks: until the controller ends the run.
    """
    import torch.distributed as dist

    store = open_store(world)
    if world.device == "cuda":  # while the controller starts
        from spmd_rl.kernels.runtime.preload import import_gpu_kernels

        import_gpu_kernels()
    if controller is not None:
        store.set(ENDPOINT_KEY, msgspec.json.encode(controller.await_address()).decode())
    lifecycle = _connect(world, store, controller)
    lifecycle.final_message.newest_step = lambda: _newest(lifecycle.checkpoints)
    if controller is not None:
        controller.final_message = lifecycle.final_message
    join(world, store)
    prove(world)
    Worker(Meshes(world)).serve(lifecycle)
    dist.destroy_process_group()
    return _leave(lifecycle, controller)


def _leave(lifecycle: WorkerLifecycle, controller: ControllerProcess | None) -> int:
    """Say Bye, and return the rank's exit code once the controller's process has ended."""
    lifecycle.dealer.post(Bye())
    late_signal = lifecycle.close()
    exit_code = controller.wait() if controller is not None else 0
    if late_signal is not None:
        signal.raise_signal(late_signal)  # the launcher that sent it waits for this process to end
    return exit_code


def _newest(checkpoints: str) -> int | None:
    """Return the step after which the newest checkpoint in this folder was saved, if there is one.

    The folder is "" until the controller has sent it.
    """
    return Checkpoints(Path(checkpoints), 1, 0).newest() if checkpoints else None


def _connect(world: World, store: Store, controller: ControllerProcess | None) -> WorkerLifecycle:
    """Connect to the controller at the address that rank 0 put into the store.

    Another process may write to the store, but only a holder of the secret can open the socket.
    Raises: SpmdError when rank 0 gives no address, or the store holds something else.
    """
    from zmq import ZMQError

    try:
        text = store.get(ENDPOINT_KEY)
    except RuntimeError as error:  # torch's DistError is one
        raise DeadlineError(
            f"rank {world.rank} did not hear from rank 0 where the controller is: {error}"
        ) from error
    keys = secret.derive_keys(secret.from_environment() or secret.read(secret.generated_file()))
    hello = Hello(world.rank, socket.gethostname(), os.getpid())
    abandon = controller.kill if controller is not None else lambda: None
    try:
        address = msgspec.json.decode(text, type=Address)
        return WorkerLifecycle(address.endpoint, keys, address.generation, hello, abandon)
    except (msgspec.MsgspecError, ZMQError) as error:
        raise SpmdError(
            f"torchrun's store holds no address of the controller ({error}): "
            "another process writes to it, so run torchrun on a network of its own"
        ) from error
