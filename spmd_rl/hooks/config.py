"""Settings of hooks: which functions they are, and what bounds their processes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from spmd_rl.config.rules import at_least, require


@dataclass(frozen=True)
class HookConfig:
    """The functions besides the reward, and the processes that run them (docs/hooks.md)."""

    # makes the samples of a prompt in several turns: async module:function or path/to/file.py:f,
    # or a class with open, play and close
    generate: str = ""
    # says how the sources of a mixture are weighted at a step: module:function or file.py:f
    pick_sources: str = ""
    keep_group: str = ""  # says whether a group is trained on: module:function or file.py:f
    # more reward functions, for records and evaluation sets that name their own
    extra_rewards: tuple[str, ...] = ()
    processes: int = 2  # of each rank and kind, at most; they are started when they are needed
    concurrency: int = 64  # async calls at once in one process
    deadline_s: float = 30.0  # of one reward call, and between two awaits of an async one; 0: none
    # of one episode, without the time that it waits for the engine; 0: none
    episode_deadline_s: float = 300.0
    # "raise" ends the run with the sample that a hook failed on, "fail" leaves that sample out
    on_error: Literal["raise", "fail"] = "raise"

    def __post_init__(self) -> None:
        at_least(self, {"processes": 1, "concurrency": 1})
        for name in ("deadline_s", "episode_deadline_s"):
            value = getattr(self, name)
            require(0 <= value < math.inf, name, value, "0 (none) or more, and finite")
