"""Ours: the real controller and the real workers' loop, CURVE on; only torch and its process groups
are left out.

python -m benchmarks.control.ours WORKERS
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import socket
import sys
import tempfile

import numpy as np
from numpy.typing import NDArray

from benchmarks.control.echo import serve
from spmd_rl.config.run import RunConfig
from spmd_rl.controller.channel import secret
from spmd_rl.controller.channel.secret import Keys
from spmd_rl.controller.channel.wire import Hello
from spmd_rl.controller.controller import Controller
from spmd_rl.controller.endpoint import Role, Sharded, collective
from spmd_rl.controller.lifecycle.dispatcher import Dispatcher
from spmd_rl.controller.lifecycle.worker_lifecycle import WorkerLifecycle
from spmd_rl.controller.worker import Worker
from spmd_rl.mesh.role_context import Meshes, RoleContext
from spmd_rl.mesh.split import Placement
from spmd_rl.mesh.world import World


class Echo(Role):
    @collective
    def echo(self, parts: Sharded[list[NDArray[np.uint8]]]) -> Sharded[list[NDArray[np.uint8]]]:
        return parts


class BareSeats(Meshes):
    """Seats without meshes or groups."""

    def context(self, placement: Placement) -> RoleContext:
        return RoleContext(self.world, placement, None, None, self.neighbours)  # type: ignore[arg-type]


def work(rank: int, num_workers: int, endpoint: str, keys: Keys, generation: int) -> None:
    world = World(rank, num_workers, rank, num_workers, 0, "benchmark", 0)
    hello = Hello(rank, socket.gethostname(), os.getpid())
    Worker(BareSeats(world)).serve(WorkerLifecycle(endpoint, keys, generation, hello))


def main() -> None:
    from benchmarks.control.ours import Echo as NamedEcho  # by a name that workers can import

    num_workers = int(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        endpoint, generation = f"ipc://{folder}/s", secrets.randbits(63)
        keys = secret.derive_keys(secrets.token_bytes(secret.SECRET_BYTES))
        fork = multiprocessing.get_context("fork")
        for rank in range(num_workers):
            fork.Process(
                target=work, args=(rank, num_workers, endpoint, keys, generation), daemon=True
            ).start()
        near, _far = socket.socketpair()
        board = Dispatcher(RunConfig(folder=folder), num_workers, endpoint, keys, generation, near)
        board.wait_for_all()
        placement = Placement(
            "echo", tuple(range(num_workers)), {"dp": num_workers, "fsdp": 1, "tp": 1}
        )
        handle = Controller(RunConfig(folder=folder), board).spawn(
            NamedEcho, RunConfig(), on=placement
        )
        serve(num_workers, handle.echo.call)


if __name__ == "__main__":
    main()
