"""Small recipe that does all that a run does: collectives, phases, metrics, checkpoints."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spmd_rl.config.run import RunConfig
from spmd_rl.controller.controller import Controller
from spmd_rl.controller.endpoint import Role, Sharded, collective, local
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.mesh.split import RoleSplit
from tests.system.faults import install_in_controller, struck_file

install_in_controller()
LEAVE_AFTER = 30  # steps


@dataclass(frozen=True)
class Config:
    steps: int = 120  # each of about 30 ms
    leaves: int = -1  # the rank that exits with code 0, once, in step 31
    run: RunConfig = field(default_factory=lambda: RunConfig(save_every=5))


class Toiler(Role):
    """A role whose state is one number, to which every step adds."""

    def __init__(self, cfg: Config, context: RoleContext) -> None:
        super().__init__(cfg, context)
        self.total = 0.0
        self.leaves = cfg.leaves

    @collective
    def work(self, values: Sharded[NDArray[np.float64]]) -> float:
        time.sleep(0.02)
        if (
            self.context.rank == self.leaves
            and self.total >= 64.0 * LEAVE_AFTER
            and not struck_file().exists()
        ):
            struck_file().touch()
            os._exit(0)
        self.total += float(self.context.all_reduce_sum(np.array([values.sum()]))[0])
        return self.total

    @collective
    def save(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"total_{self.context.rank}.json").write_text(
            json.dumps([self.total] * 500)
        )
        self.context.barrier()

    @collective
    def wait_until_saved(self) -> None: ...

    @local
    def resume_differences(self) -> list[str]:
        return []

    @collective
    def load(self, folder: str) -> None:
        self.total = json.loads((Path(folder) / f"total_{self.context.rank}.json").read_text())[0]


def main(ctl: Controller, cfg: Config) -> None:
    roles = ctl.world.split({"toiler": RoleSplit()})
    toiler = ctl.spawn(Toiler, cfg, on=roles.toiler)
    start = ctl.resume(toiler=toiler)
    print("started", flush=True)
    for step in ctl.steps(cfg.steps, start):
        with ctl.phase("work"):
            total = toiler.work.call(np.full(64, 1.0))
        assert total == 64.0 * (step.index + 1), "a step was lost or done twice"
        step.log({"train/loss": total})
    print("completed", flush=True)
