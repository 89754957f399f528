"""A recipe in which one rank does not come to a collective on GPUs that the other is in, for
test_two_gpus.py.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path

import spmd_rl as rl


@dataclass(frozen=True)
class Config:
    how: str = "sleep"  # or "stop"
    run: rl.RunConfig = field(default_factory=rl.RunConfig)


class Actor(rl.Role):
    @rl.collective
    def sum_twice(self) -> None:
        """The last rank comes to the first sum, and never to the second."""
        self._sum()
        if self.context.rank == self.context.size - 1:
            Path(f"{self.cfg.run.name}.alone").touch()
            if self.cfg.how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            threading.Event().wait()
        self._sum()

    def _sum(self) -> None:
        import torch
        import torch.distributed as dist

        numbers = torch.ones(1 << 20, device=self.context.device)
        dist.all_reduce(numbers, group=self.context.group)
        numbers[0].item()  # waits


def main(ctl: rl.Controller, cfg: Config) -> None:
    actor = ctl.spawn(Actor, cfg, on=ctl.world.split({"actor": rl.RoleSplit()}).actor)
    with ctl.phase("train"):
        actor.sum_twice.call()
