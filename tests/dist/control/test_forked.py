"""A process that a rank forked shares its sockets, and must not hide the rank's death."""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dist.launched import Launched

pytestmark = pytest.mark.dist

LAST_RESORT_S = 600.0

RECIPE = """
import json, os, threading
from dataclasses import dataclass, field

import spmd_rl as rl

@dataclass(frozen=True)
class Config:
    run: rl.RunConfig = field(default_factory=rl.RunConfig)

class Parent(rl.Role):
    @rl.collective
    def fork(self) -> rl.Sharded[list[int]]:
        child = os.fork()
        if not child:
            threading.Event().wait()
        return [os.getpid(), child]

    @rl.collective
    def wait(self) -> None:
        threading.Event().wait()

def main(ctl, cfg):
    parent = ctl.spawn(Parent, cfg, on=ctl.world.split({"parent": rl.RoleSplit()}).parent)
    print(json.dumps([os.getpid(), *parent.fork.call()]), flush=True)
    parent.wait.call()
"""


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_death_of_a_rank_that_forked(
    launch: Callable[..., Launched], tmp_path: Path, num_ranks: int
) -> None:
    (tmp_path / "forking.py").write_text(RECIPE)
    process = launch("run", "forking.py", f"--nproc={num_ranks}", "--run.lost_after_s=100000")
    controller, *pids = json.loads(process.stdout.readline())
    alive = os.pidfd_open(controller)
    os.kill(pids[-2], signal.SIGKILL)
    assert select.select([alive], [], [], LAST_RESORT_S)[0], "while what it forked lives"
    os.close(alive)
    for child in pids[1::2]:
        os.kill(child, signal.SIGKILL)
    _, err = process.communicate(timeout=LAST_RESORT_S)
    # without the launcher's sentence beside it, and without those of a slow start
    (said,) = (line for line in err.splitlines() if not line.endswith(" ..."))
    assert said.startswith(f"lost rank {num_ranks - 1} (")
    assert process.returncode == 1
