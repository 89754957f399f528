"""A step of the loop and where its seconds went."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from spmd_rl.types.samples import Group


class Observer(Protocol):
    """Whoever records a run: the controller tells it what happened, and asks it for nothing."""

    def on_steps(self, start: int, num_steps: int) -> None:
        """The loop begins at step `start` and will end after step `num_steps - 1`."""

    def on_warmup(self, num_steps: int) -> None:
        """Steps before step 1 begin, as many as these."""

    def on_phase(self, name: str, seconds: float | None) -> None:
        """A phase began (`seconds` is None) or ended."""

    def on_log(self, step: Step, what: tuple[Any, ...]) -> None:
        """The recipe logged `what` for this step."""

    def on_step(self, step: Step) -> None:
        """The step ended; its times are complete."""

    def catch_up(self) -> None:
        """Write what is not written yet: the controller waits for workers, or is about to save."""

    def leave_screen(self) -> None:
        """The run is about to end: nothing is drawn over what was said last."""

    def close(self) -> None:
        """The recipe ended, or failed."""


@dataclass
class Step:
    """One turn of the loop. `phase_s` are its phases' seconds by name, `waited_s` what it spent on
    workers.

    A step of a warm-up, before the loop, has an index below 0.
    """

    index: int
    observer: Observer | None = None
    began: float = field(default_factory=time.monotonic)
    elapsed_s: float = 0.0
    waited_s: float = 0.0
    phase_s: dict[str, float] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)

    @property
    def reward(self) -> float | None:
        """The mean reward of the samples logged, if there are any that have one."""
        mean = sum(self.rewards) / len(self.rewards) if self.rewards else math.nan
        return mean if math.isfinite(mean) else None

    @property
    def controller_share(self) -> float:
        """The part of the step that the controller did not spend waiting for workers.

        A step lasts from the end of the one before it, so that what is done between steps is part
        of it. What is written while a call of workers is under way (`Observer.catch_up`) is not:
        they do not wait for it.
        """
        return 1.0 - self.waited_s / self.elapsed_s if self.elapsed_s else 0.0

    def log(self, *what: Any) -> None:
        """Hand what the recipe knows of this step to the observer."""
        groups = [
            item
            for listed in what
            if isinstance(listed, list)
            for item in listed
            if isinstance(item, Group)
        ]
        self.rewards += Group.to_columns(groups).samples.reward.tolist()
        if self.observer is not None:
            self.observer.on_log(self, what)
