"""Process of a worker: one rank from joining the world to its exit code."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from spmd_rl.controller.channel import secret
from spmd_rl.controller.channel.address import Address
from spmd_rl.controller.channel.messages import Bye, Hello
from spmd_rl.controller.lifecycle.controller_process import ControllerProcess
from spmd_rl.controller.lifecycle.deadlines import DEATH_NEWS_S
from spmd_rl.controller.lifecycle.worker_lifecycle import WorkerLifecycle
from spmd_rl.controller.run.checkpoints import Checkpoints
from spmd_rl.controller.worker import Worker
from spmd_rl.errors import DeadlineError, SpmdError
from spmd_rl.mesh.connection_proof import prove
from spmd_rl.mesh.role_context import Meshes
from spmd_rl.mesh.world import World, join, open_store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ENDPOINT_KEY = "spmd_rl/endpoint"


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
    try:
        join(world, store)
        prove(world)
    except RuntimeError:  # a connection has ended: the controller may know of a rank that has
        lifecycle.await_end(DEATH_NEWS_S)
        raise
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
    return Checkpoints(Path(checkpoints)).newest() if checkpoints else None


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
