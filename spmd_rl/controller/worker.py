"""A worker: one torchrun rank. Its main thread runs the controller's commands in order, one at a time."""

from __future__ import annotations

import os
import signal
import socket
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from spmd_rl.controller import secret
from spmd_rl.controller.address import Address
from spmd_rl.controller.codec import Packed, pack, resolve, unpack
from spmd_rl.controller.dealer import Dealer
from spmd_rl.controller.endpoint import Bound, Signature, endpoints
from spmd_rl.controller.supervisor import ControllerProcess
from spmd_rl.controller.wire import Bye, Call, Command, Failure, Hello, Result, Spawn, Split, Stop
from spmd_rl.errors import ContractError, DeadlineError, SpmdError
from spmd_rl.mesh.place import Seats
from spmd_rl.mesh.world import World, join, open_store
from spmd_rl.observe.trace import Trace

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ENDPOINT_KEY = "spmd_rl/endpoint"
FLUSH_S = 0.1  # between two writings of the spans


class Worker:
    """The roles of one rank, by name."""

    def __init__(self, seats: Seats) -> None:
        self._seats = seats
        self._trace = Trace()
        self._roles = seats.neighbours
        self._known: dict[tuple[str, str], tuple[Bound[..., Any], Signature]] = {}

    def serve(self, dealer: Dealer) -> None:
        """Run commands until told to stop.

        Blocks: between commands, on the controller; the process ends if it is lost.
        """
        while True:
            command, payload = dealer.next()
            if isinstance(command, Stop):
                self._trace.close()
                return
            reply, out = self.answer(command, payload)
            dealer.post(reply, out)
            self._trace.flush(every_s=FLUSH_S)

    def answer(self, command: Command, payload: bytes) -> tuple[Result | Failure, bytes]:
        """Run one command; whatever it raises becomes the reply."""
        try:
            value = self._run(command, payload)
        except Exception as error:  # noqa: BLE001  user code may raise anything: the controller decides what it ends
            return failure_of(command.call, error), b""
        return Result(command.call, msgspec.Raw(value.body)), value.payload

    def _run(self, command: Command, payload: bytes) -> Packed:
        match command:
            case Split(_, placements, traces):
                if traces and not self._trace.on:
                    rank = self._seats.world.rank
                    self._trace = Trace(Path(traces), f"rank {rank}", rank=rank)
                self._seats.build(placements)
            case Spawn(_, name, role, placement, cfg_type, cfg):
                config = unpack(Packed(bytes(cfg), payload), resolve(cfg_type))
                self._roles[name] = resolve(role)(config, self._seats.place(placement))
            case Call(call, name, endpoint, args, phase):
                with self._trace.span(f"{name}.{endpoint}", role=name, phase=phase, call=call):
                    return self._call(name, endpoint, Packed(bytes(args), payload))
        return pack(None)

    def _call(self, name: str, endpoint: str, packed: Packed) -> Packed:
        if (name, endpoint) not in self._known:
            role = self._roles[name]
            self._known[name, endpoint] = getattr(role, endpoint), Signature(endpoints(type(role))[endpoint])
        method, signature = self._known[name, endpoint]
        try:
            arguments = unpack(packed, signature.arguments)
        except ContractError as error:
            raise ContractError(f"{name}.{endpoint}: {error}") from error
        return pack(method(**msgspec.structs.asdict(arguments)), signature.result)


def failure_of(call: int, error: Exception) -> Failure:
    """An exception as the wire carries it."""
    return Failure(
        call=call,
        kind=type(error).__name__,
        sentence=str(error),
        traceback="".join(traceback.format_exception(error)),
        exit_code=error.exit_code if isinstance(error, SpmdError) else 1,
    )


def run_worker(world: World, controller: ControllerProcess | None) -> int:
    """One rank's life, from torchrun's environment to its exit code. Rank 0 brings the controller it started.

    Blocks: until the controller ends the run.
    """
    import torch.distributed as dist

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(
            number, signal.SIG_DFL
        )  # a launcher's own handlers, inherited, would wait for the store's C++ code
    store = open_store(world)
    if controller is not None:
        store.set(ENDPOINT_KEY, msgspec.json.encode(controller.await_address()).decode())
    dealer = _dial(world, store, controller)
    join(world, store)
    Worker(Seats(world)).serve(dealer)
    dist.destroy_process_group()
    dealer.post(Bye())
    dealer.close()
    return controller.wait() if controller is not None else 0


def _dial(world: World, store: Store, controller: ControllerProcess | None) -> Dealer:
    from torch.distributed import DistError

    try:
        text = store.get(ENDPOINT_KEY)
    except DistError as error:
        raise DeadlineError(f"rank {world.rank} did not hear from rank 0 where the controller is: {error}") from error
    address = msgspec.json.decode(text, type=Address)
    keys = secret.derive(secret.given() or secret.read(Path(address.secret_file)))
    hello = Hello(world.rank, socket.gethostname(), os.getpid())
    abandon = controller.kill if controller is not None else lambda: None
    return Dealer(address.endpoint, keys, address.generation, hello, abandon)
