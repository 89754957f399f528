"""LoopStep: one step of a recipe's loop; RunObserver: the base of whoever records the steps."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spmd_rl.types.groups import Group


class RunObserver:
    """The recorder of a run: the controller tells it what happened, and asks it for nothing.

    This one records nothing.
    """

    def on_steps(self, start: int, num_steps: int) -> None:
        """Note that the loop begins at step `start` and will end after step `num_steps - 1`."""

    def on_warmup(self, num_steps: int) -> None:
        """Note that `num_steps` steps before step 1 begin."""

    def on_phase(self, name: str, seconds: float | None) -> None:
        """Note that a phase began (`seconds` is None) or ended."""

    def on_log(self, step: LoopStep, what: tuple[Any, ...]) -> None:
        """Note what the recipe logged for this step."""

    def on_step(self, step: LoopStep) -> None:
        """Note that the step ended: its times are complete."""

    def on_evaluation(
        self, num_steps: int, metrics: Mapping[str, float], groups: Mapping[str, list[Group]]
    ) -> None:
        """Note what an evaluation of the weights after `num_steps` steps found.

        `groups` are the samples of each set by its name.
        """

    def on_counts(self, counts: Mapping[str, int]) -> None:
        """Note what all ranks count now, by name. Another thread than the recipe's calls it."""

    def on_early_end(self, sentence: str) -> None:
        """Note that the steps end before the last of them; `sentence` says why."""

    def catch_up(self) -> None:
        """Write what is not written yet: the controller waits for workers, or is about to save."""

    def leave_screen(self) -> None:
        """Stop drawing: the run is about to print its last message."""

    def close(self) -> None:
        """Finish: the recipe ended, or failed."""


@dataclass
class LoopStep:
    """One step of the loop. `phase_s` holds the seconds of each phase by name, and `waited_s` the
    seconds spent waiting for workers. `measured` are metrics of the controller itself.

    A step of a warm-up, before the loop, has an index below 0. `why_run_ends` says why the run ends
    before this step; "" if it does not.
    """

    index: int
    observer: RunObserver = field(default_factory=RunObserver)
    began: float = field(default_factory=time.monotonic)
    elapsed_s: float = 0.0
    waited_s: float = 0.0
    phase_s: dict[str, float] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    why_run_ends: str = ""

    @property
    def reward(self) -> float | None:
        """The mean reward of the samples logged; None if there is none, or it is not finite."""
        mean = sum(self.rewards) / len(self.rewards) if self.rewards else math.nan
        return mean if math.isfinite(mean) else None

    @property
    def controller_share(self) -> float:
        """The part of the step that the controller did not spend waiting for workers.

        A step lasts from the end of the one before it, so it includes the work between steps. What
        `RunObserver.catch_up` writes during a call of workers does not count: they do not wait for
        it.
        """
        return 1.0 - self.waited_s / self.elapsed_s if self.elapsed_s else 0.0

    def record(self, metrics: Mapping[str, float]) -> None:
        """Keep these metrics. Seconds and GiB of a step add up, as those of several pushes."""
        for name, value in metrics.items():
            before = self.measured.get(name, 0.0) if name.endswith(("_s", "_gib")) else 0.0
            self.measured[name] = before + value

    def end_run(self, why: str) -> None:
        """Note that the run ends before this step, in which nothing was learned; `why` is a clause.

        The recipe then goes on to the next step, which does not come. A checkpoint is saved as
        after the last step.
        """
        self.why_run_ends = f"{why}: the run ends after step {self.index}"

    def log(self, *what: Any) -> None:
        """Hand what the recipe knows of this step to the observer."""
        lists = [item for item in what if isinstance(item, list)]
        groups = [item for items in lists for item in items if isinstance(item, Group)]
        self.rewards += Group.to_columns(groups).samples.reward.tolist()
        self.observer.on_log(self, what)
