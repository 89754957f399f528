"""Recipe that fails in the way its config names, for the tests beside it."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from spmd_rl.config.run import RunConfig
from spmd_rl.controller.controller import Controller
from spmd_rl.controller.endpoint import Role, Sharded, collective, local
from spmd_rl.errors import DataError
from spmd_rl.mesh.split import RoleSplit
from spmd_rl.types.prompts import Prompt


class Actor(Role):
    @collective
    def double(self, prompts: Sharded[list[Prompt]], times: int = 2) -> Sharded[list[Prompt]]:
        return [
            Prompt(uid=p.uid, tokens=p.tokens * times, meta={"rank": self.context.rank})
            for p in prompts
        ]

    @collective
    def total(self, values: Sharded[NDArray[np.float64]]) -> NDArray[np.float64]:
        return self.context.all_reduce_sum(np.array([values.sum()]))

    @collective
    def fold(self, function: Callable[[float], float], value: float) -> float:
        return function(value)

    @local
    def whoami(self) -> int:
        return self.context.rank

    @collective
    def pids(self) -> Sharded[list[int]]:
        return [os.getpid()]

    @collective
    def differ(self) -> int:
        return self.context.rank

    @collective
    def boom(self) -> None:
        if self.context.rank == self.context.size - 1:
            raise KeyError("no such thing")
        self.context.barrier()

    @collective
    def bad_line(self) -> None:
        raise DataError("train.jsonl:7", "not JSON")

    @collective
    def leave(self) -> None:
        os._exit(0)

    @collective
    def hang(self) -> None:
        """The last rank never enters the barrier that the others are in.

        It writes to the named pipe `hangs`, if there is one, which waits for a reader.
        """
        if self.context.rank == self.context.size - 1:
            if os.path.exists("hangs"):
                open("hangs", "w").close()
            threading.Event().wait()
        self.context.barrier()


@dataclass(frozen=True)
class Config:
    scenario: str = "fine"
    run: RunConfig = field(default_factory=RunConfig)


def scaled(value: float, by: float) -> float:
    return value * by


def main(ctl: Controller, cfg: Config) -> None:
    roles = ctl.world.split({"actor": RoleSplit()})
    actor = ctl.spawn(Actor, cfg, on=roles.actor)
    report = {"controller": os.getpid(), "ranks": actor.pids.call()}
    print(json.dumps(report), flush=True)
    match cfg.scenario:
        case "fine":
            fine(ctl, actor)
        case "once":
            if not os.path.exists("failed"):
                os.mkdir("failed")
                actor.boom.call()
            fine(ctl, actor)
        case "raise":
            actor.boom.call()
        case "data":
            actor.bad_line.call()
        case "differ":
            actor.differ.call()
        case "hang":
            with ctl.phase("rollout"):
                actor.hang.call()
        case "leave":
            actor.leave.call()
        case "deadline":
            actor.hang.start().wait(deadline_s=3)
        case "ever":
            while True:
                time.sleep(0.01)
        case "recipe":
            raise ZeroDivisionError("in the recipe")
        case "exit":
            sys.exit()


def fine(ctl: Controller, actor: Actor) -> None:
    prompts = [Prompt(uid=i, tokens=np.arange(i, dtype=np.int32)) for i in range(5)]
    doubled = actor.double.call(prompts, times=3)
    assert [p.uid for p in doubled] == [0, 1, 2, 3, 4]
    assert [p.meta["rank"] for p in doubled] == [0, 0, 0, 1, 1]
    assert all((p.tokens == np.arange(p.uid) * 3).all() for p in doubled)
    assert actor.total.call(np.arange(11.0)) == 55.0
    pending = [actor.whoami.start() for _ in range(2)]
    assert {one.wait() for one in pending} <= {0, 1}
    assert actor.fold.call(partial(scaled, by=2.5), 4.0) == 10.0
    for step in ctl.steps(5, start=3):
        with ctl.phase("nap"):
            actor.whoami.call()
        assert step.phase_s.keys() == {"nap"}
    assert "torch" not in sys.modules, "the controller must not pay for torch"
    print("all fine", flush=True)
