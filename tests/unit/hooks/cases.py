"""Prompts and samples for tests of hooks, and a loop around a pool."""

from __future__ import annotations

import select
from collections.abc import Callable
from pathlib import Path

import numpy as np

from spmd_rl.hooks.pool import HookPool
from spmd_rl.hooks.tasks import EngineCall, Event
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

HERE = Path(__file__).parent
HOOKS = str(HERE / "hook_functions.py")


def make_prompt(uid: int = 7, text: str = "37+48=") -> Prompt:
    return Prompt(uid, np.array([1, 2], np.int32), text=text, answer="85")


def make_sample(text: str = "84", index: int = 3, uid: int = 7) -> Sample:
    num = len(text)
    zeros = np.zeros(num, np.int32)
    return Sample(uid, index, zeros, np.zeros(num, np.float32), zeros, "completed", text=text)


def events_of(
    pool: HookPool,
    answer: Callable[[EngineCall], None] | None = None,
    until: Callable[[], bool] | None = None,
) -> dict[int, Event]:
    """Poll until nothing is unfinished, or until `until`; return the last event of each task."""
    last: dict[int, Event] = {}
    while pool.num_unfinished and not (until and until()):
        for event in pool.poll():
            if isinstance(event, EngineCall):
                assert answer is not None, "an engine call that nobody expects"
                answer(event)
            else:
                assert event.task_id not in last, "two events of one task"
                last[event.task_id] = event
        if pool.num_unfinished:
            select.select(pool.filenos(), [], [], 0.2)
    return last
