"""A worker: one torchrun rank. Its main thread runs the controller's commands in order, one at a
time.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from spmd_rl.controller.channel import secret
from spmd_rl.controller.channel.address import Address
from spmd_rl.controller.channel.codec import NOTHING, Codec, Packed, pack
from spmd_rl.controller.channel.dealer import Answer
from spmd_rl.controller.channel.import_names import resolve
from spmd_rl.controller.channel.wire import (
    BuildMeshes,
    Bye,
    Call,
    Command,
    Failure,
    Hello,
    Result,
    Spawn,
    Stop,
    encode,
)
from spmd_rl.controller.endpoint import Signature, endpoints
from spmd_rl.controller.lifecycle.controller_process import ControllerProcess
from spmd_rl.controller.lifecycle.worker_lifecycle import WorkerLifecycle
from spmd_rl.controller.run.checkpoints import Checkpoints
from spmd_rl.errors import ContractError, DeadlineError, SpmdError
from spmd_rl.mesh.connection_proof import prove
from spmd_rl.mesh.role_context import Meshes
from spmd_rl.mesh.world import World, join, open_store
from spmd_rl.observe.trace import Trace, now_ns

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ENDPOINT_KEY = "spmd_rl/endpoint"
_RESULT = encode(Result())


@dataclass(frozen=True, slots=True)
class _Served:
    """One endpoint of a role that lives here."""

    what: str
    names: tuple[str, ...]
    run: Callable[..., Any]
    arguments: Codec
    result: Codec


class Worker:
    """The roles of one rank, by name."""

    def __init__(self, meshes: Meshes) -> None:
        self._meshes = meshes
        self._pid = os.getpid()
        self._trace = Trace()
        self._roles = meshes.neighbours
        self._known: dict[tuple[str, str], _Served] = {}

    def serve(self, lifecycle: WorkerLifecycle) -> None:
        """Run commands until told to stop.

        Blocks: between commands, on the controller; the process ends if it is lost.
        """
        lifecycle.on_idle = lambda: self._trace.flush()
        dealer = lifecycle.dealer
        answer: Answer | None = None
        while True:
            command, value, number = dealer.next(answer)
            if type(command) is Stop:  # isinstance takes ten times as long to say no of a message
                self._trace.close()
                return
            header, result = _RESULT, NOTHING
            try:
                if type(command) is Call:
                    result = self._call(command, value, number)
                else:
                    result = self._build(command, value)
            # user code may raise anything: the controller decides what it ends
            except BaseException as error:
                if os.getpid() != self._pid:  # in a process that it forked
                    raise
                header = encode(failure_of(error))
            if os.getpid() != self._pid:  # such a process came back: the commands are not for it
                os._exit(0)
            answer = header, result, number

    def _call(self, call: Call, value: Packed, number: int) -> Packed:
        served = self._known.get((call.name, call.endpoint)) or self._learn(
            call.name, call.endpoint
        )
        began_ns = now_ns() if self._trace.on else 0
        try:
            try:
                arguments = served.arguments.unpack(value)
            except ContractError as error:
                raise ContractError(f"{served.what}({', '.join(served.names)}): {error}") from error
            return served.result.pack(served.run(*arguments))
        finally:
            if self._trace.on:
                self._trace.add(
                    served.what, began_ns, now_ns(), role=call.name, phase=call.phase, call=number
                )

    def _learn(self, name: str, endpoint: str) -> _Served:
        role = self._roles[name]
        signature = Signature(endpoints(type(role))[endpoint])
        method, arguments, result = signature.method(role), signature.arguments, signature.result
        served = _Served(f"{name}.{endpoint}", signature.names, method, arguments, result)
        self._known[name, endpoint] = served
        return served

    def _build(self, command: Command, value: Packed) -> Packed:
        """The numeric contract of the role that was built, or nothing."""
        if isinstance(command, Spawn):
            config = Codec(resolve(command.cfg_type)).unpack(value)
            role = self._roles[command.name] = resolve(command.role)(
                config, self._meshes.context(command.placement)
            )
            gc.collect()
            # roles and what they imported stay: a full collection would look through all of it
            gc.freeze()
            return pack(role.numeric_contract() if hasattr(role, "numeric_contract") else None)
        if isinstance(command, BuildMeshes):
            if command.traces and not self._trace.on:
                rank = self._meshes.world.rank
                self._trace = self._meshes.trace = Trace(
                    Path(command.traces), f"rank {rank}", rank=rank
                )
            self._meshes.build(command.placements)
        return NOTHING


def failure_of(error: BaseException) -> Failure:
    """An exception as the wire carries it."""
    return Failure(
        kind=type(error).__name__,
        sentence=_encodable(str(error)),
        traceback=_encodable("".join(traceback.format_exception(error))),
        exit_code=error.exit_code if isinstance(error, SpmdError) else 1,
    )


def _encodable(text: str) -> str:
    """`text` with what UTF-8 has no bytes for, halves of surrogate pairs, spelled out."""
    return text.encode(errors="backslashreplace").decode()


def run_worker(world: World, controller: ControllerProcess | None) -> int:
    """One rank's life, from torchrun's environment to its exit code. Rank 0 brings the controller
    it started.

    Blocks: until the controller ends the run.
    """
    import torch.distributed as dist

    store = open_store(world)
    if controller is not None:
        store.set(ENDPOINT_KEY, msgspec.json.encode(controller.await_address()).decode())
    lifecycle = _dial(world, store, controller)
    lifecycle.final_message.newest_step = lambda: _newest(lifecycle.checkpoints)
    if controller is not None:
        controller.final_message = lifecycle.final_message
    join(world, store)
    prove(world)
    Worker(Meshes(world)).serve(lifecycle)
    dist.destroy_process_group()
    lifecycle.dealer.post(Bye())
    late = lifecycle.close()
    exit_code = controller.wait() if controller is not None else 0
    if late is not None:
        signal.raise_signal(late)  # a launcher that sent it waits for the end of this process
    return exit_code


def _newest(checkpoints: str) -> int | None:
    """The step that a run with this folder goes on after; it is "" until the controller has told
    it.
    """
    return Checkpoints(Path(checkpoints), 1, 0).newest() if checkpoints else None


def _dial(world: World, store: Store, controller: ControllerProcess | None) -> WorkerLifecycle:
    """Dial where rank 0 says the controller is. Whoever else may write to the store, only the
    secret opens the socket.

    Raises: SpmdError when rank 0 does not say it, or the store holds no address.
    """
    from zmq import ZMQError

    try:
        text = store.get(ENDPOINT_KEY)
    except RuntimeError as error:  # DistError is one
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
            f"torchrun's store holds no address of the controller ({error}): another process writes to it, "
            "so run torchrun on a network of its own"
        ) from error
