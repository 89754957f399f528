"""Processes that `python -m tests.fuzz` attacks: a live controller at work, and live workers.

    python -m tests.fuzz.live controller ADDRESS GENERATION

calls rank 0 until its stdin ends, then reports;

    python -m tests.fuzz.live worker ENDPOINT GENERATION RANK

serves one role until it is told to stop.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
from types import SimpleNamespace

from spmd_rl.config.run import RunConfig
from spmd_rl.controller.channel import secret
from spmd_rl.controller.channel.messages import Bye, Hello
from spmd_rl.controller.endpoint import Role, collective
from spmd_rl.controller.handle import Handle
from spmd_rl.controller.lifecycle.dispatcher import Dispatcher
from spmd_rl.controller.lifecycle.worker_lifecycle import WorkerLifecycle
from spmd_rl.controller.worker import Worker
from spmd_rl.mesh.split import Placement

NAME = "echo"
WORLD = 2  # rank 0 is a worker, rank 1 is the attacker


class Echo(Role):
    @collective
    def echo(self, value: int) -> int:
        return value


def controller(address: str, generation: int, keys: secret.Keys) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryDirectory() as folder:
        run = RunConfig(folder=folder, deadline_s=20.0)
        board = Dispatcher(run, WORLD, address, keys, generation, ours)
        print(json.dumps({"endpoint": board.endpoint}), flush=True)
        board.wait_for_all()
        echo, ended, calls = (
            Handle(NAME, Echo, Placement(NAME, (0,), {"dp": 1, "fsdp": 1, "tp": 1}), board),
            threading.Event(),
            0,
        )
        threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
        print(json.dumps({"working": echo.echo.call(0) == 0}), flush=True)
        while not ended.wait(0.001):
            calls += 1
            assert echo.echo.call(calls) == calls
        board.stop(None)  # the attacker's Bye comes after all its frames
        print(json.dumps({"calls": calls, "refused": board.refused}), flush=True)


def worker(endpoint: str, generation: int, rank: int, keys: secret.Keys) -> None:
    hello = Hello(rank, socket.gethostname(), os.getpid())
    lifecycle = WorkerLifecycle(endpoint, keys, generation, hello)
    alone = SimpleNamespace(shard_size=1, shard_rank=0)
    echo = Echo(None, alone)  # type: ignore[arg-type]
    Worker(SimpleNamespace(neighbours={NAME: echo})).serve(lifecycle)  # type: ignore[arg-type]
    lifecycle.dealer.post(Bye())
    lifecycle.close()


def main(words: list[str]) -> None:
    key = secret.from_environment()
    assert key is not None
    keys = secret.derive_keys(key)
    match words:
        case ["controller", address, generation]:
            controller(address, int(generation), keys)
        case ["worker", endpoint, generation, rank]:
            worker(endpoint, int(generation), int(rank), keys)


if __name__ == "__main__":
    main(sys.argv[1:])
