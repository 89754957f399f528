"""Recipe that connects to the test, reports where it runs, and obeys an order.

`end` ends it, `fail` fails it, `go on` lets it do its steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spmd_rl.config.run import RunConfig
from spmd_rl.controller.controller import Controller
from spmd_rl.controller.endpoint import Role, Sharded, collective
from spmd_rl.mesh.split import RoleSplit

MANY = 100_000  # each step takes one or two milliseconds


@dataclass(frozen=True)
class Config:
    report_socket: str = ""  # the socket of the test
    note: str = ""
    run: RunConfig = field(default_factory=RunConfig)


class Witness(Role):
    @collective
    def total(self, value: int) -> int:
        """Return the sum over all ranks, by a collective."""
        return int(self.context.all_reduce_sum(np.array([float(value)]))[0])

    @collective
    def locations(self) -> Sharded[list[str]]:
        """Return the node and pid of each rank."""
        print("a rank has started", flush=True)
        return [f"{os.environ['SLURMD_NODENAME']}:{os.getpid()}"]


class EmptyPart:
    """A part to save in checkpoints."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None: ...


def main(ctl: Controller, cfg: Config) -> None:
    roles = ctl.world.split({"witness": RoleSplit()})
    witness = ctl.spawn(Witness, cfg, on=roles.witness)
    locations = [location.split(":") for location in witness.locations.call()]
    secret = Path(os.environ["SPMD_RL_SECRET_FILE"])
    start = ctl.resume(part=EmptyPart())
    report = {
        "step": start,
        "nodes": [node for node, _ in locations],
        "pids": [int(pid) for _, pid in locations],
        "total": witness.total.call(1),
        "job": int(os.environ["SLURM_JOB_ID"]),
        "requeues": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        "note": cfg.note,
        "secret_file": str(secret),
        "secret_mode": oct(secret.stat().st_mode & 0o777),
        "secret_hash": hashlib.sha256(secret.read_bytes()).hexdigest(),
    }
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(cfg.report_socket)
        line.sendall(json.dumps(report).encode() + b"\n")
        order = line.recv(16)
    if order == b"fail":
        raise RuntimeError("told to fail")
    if order == b"go on":
        for step in ctl.steps(MANY, start):
            step.log({"train/loss": float(witness.total.call(1))})
