"""StepLoop: the steps of a run, timed, with checkpoints saved between them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NoReturn

from spmd_rl.config.run import RunConfig
from spmd_rl.controller.capabilities import Saver
from spmd_rl.controller.handle import Handle
from spmd_rl.controller.lifecycle.dispatcher import Dispatcher
from spmd_rl.controller.lifecycle.exit_message import LAUNCHER_ENV
from spmd_rl.controller.run.checkpoints import (
    CheckpointPart,
    Checkpoints,
    CheckpointState,
    ClosablePart,
)
from spmd_rl.controller.run.evaluations import Evaluations
from spmd_rl.controller.run.steps import LoopStep, RunObserver
from spmd_rl.errors import ConfigError
from spmd_rl.observe.trace import now_ns
from spmd_rl.offload.residency import Receipt
from spmd_rl.types.groups import Group

GIB = 1 << 30


class StepLoop:
    """The steps and phases of one run, and the checkpoints between them."""

    def __init__(
        self,
        run: RunConfig,
        dispatcher: Dispatcher,
        observer: RunObserver | None,
        wake: Callable[[Sequence[Handle]], None],
    ) -> None:
        """`wake` has the roles of a checkpoint awake, to be saved or loaded."""
        self._run = run
        self._dispatcher = dispatcher
        self._observer = observer or RunObserver()
        self.evaluations = Evaluations(run)
        self._checkpoints = Checkpoints(
            run.path / "checkpoints",
            run.keep_checkpoints,
            run.keep_best,
            lambda: self.evaluations.scores,
        )
        self.num_done = 0  # steps that the loop has taken, in this start of the run or before
        self._wake = wake
        self._parts: Mapping[str, CheckpointPart] = {}
        self._roles: dict[str, Handle] = {}  # those among the parts
        self._step: LoopStep | None = None  # the step that is under way
        self._is_ending = False  # before the last step
        self._resumed_from = ""  # the checkpoint, and what cannot go on bit for bit

    def resume(self, parts: Mapping[str, CheckpointPart]) -> int:
        """Load the newest checkpoint into `parts`; return the step to continue with."""
        self._parts = parts
        self._roles = {name: part for name, part in parts.items() if isinstance(part, Handle)}
        for name, role in self._roles.items():
            if Saver not in role.capabilities:
                raise ConfigError(
                    f"the role '{name}' cannot be part of a checkpoint: "
                    "let its class inherit from rl.Saver"
                )
        self._dispatcher.final_message.newest_step = self._checkpoints.newest
        if self._checkpoints.newest() is not None:
            self._wake([*self._roles.values()])
        found = self._checkpoints.restore(parts)
        if found is None:
            return 0
        path, state = found
        differences = self._differences(state)
        self._resumed_from = str(path)
        if differences:
            listed = ", ".join(differences)
            self._resumed_from += f": not bit for bit as it would have gone on ({listed})"
        return state.next_step

    def warmup(self, num_steps: int, start: int) -> Iterator[LoopStep]:
        """Yield steps before step 1, which have negative indices; none if `start` is above 0."""
        if start:
            return
        self._observer.on_warmup(num_steps)
        self._dispatcher.calls.on_long_wait = self._observer.catch_up
        for index in range(-num_steps, 0):
            step = LoopStep(index, self._observer)
            yield step
            self._observer.on_step(step)

    def steps(self, num_steps: int, start: int) -> Iterator[LoopStep]:
        """Yield steps `start` to `num_steps - 1`, and save a checkpoint after each where due.

        They end early where evaluations, or the recipe in a step, say so.
        """
        termination, calls = self._dispatcher.termination, self._dispatcher.calls
        grace_s = self._run.grace_s
        if self._resumed_from and start < num_steps:
            print(f"resuming at step {start + 1} from {self._resumed_from}", flush=True)
        self._observer.on_steps(start, num_steps)
        calls.on_long_wait = self._observer.catch_up
        self.evaluations.load(num_steps)
        self.num_done = start
        termination.grace_s = grace_s if self._parts else 0.0
        # a step begins where the one before it ended
        began, waited_s = time.monotonic(), calls.waited_s
        for index in range(start, num_steps):
            if self._ends_before(index):
                break
            termination.lost_work = (
                f"; step {index + 1} did not end within {grace_s:g} s and is lost"
            )
            self._step = step = LoopStep(index, self._observer, began)
            try:
                yield step
            finally:  # also where the recipe leaves its loop
                began = time.monotonic()
                step.elapsed_s = began - step.began
                step.waited_s, waited_s = calls.waited_s - waited_s, calls.waited_s
                self.num_done = index if step.why_run_ends else index + 1
            self._end(step, last=index + 1 == num_steps or self._ends_before(index + 1))
        self._checkpoints.wait_until_complete()
        # a run that is ended from here on is complete: the same command does what is left
        termination.grace_s = 0.0

    def close(self) -> None:
        """End the step that the recipe left, wait for the last checkpoint, and close its parts."""
        if self._step is not None:
            self._end(self._step, last=True)
        self._checkpoints.wait_until_complete()
        for name, part in self._parts.items():
            if name not in self._roles and isinstance(part, ClosablePart):
                part.close()

    def record(self, metrics: Mapping[str, float]) -> None:
        """Add what the controller itself has measured to the current step, if there is one."""
        if self._step is not None:
            self._step.record(metrics)

    def on_receipts(self, what: str, role: str, receipts: Sequence[Receipt]) -> None:
        """Add what a role gave back or took again to the current step, and to the trace."""
        self.record(sleep_metrics(what, receipts))
        self._dispatcher.trace.add(
            f"{role}.{what}", now_ns(), now_ns(), "memory", **span_arguments(receipts)
        )

    def record_evaluation(
        self, num_steps: int, metrics: Mapping[str, float], groups: Mapping[str, list[Group]]
    ) -> None:
        """Hand what an evaluation found to the observer, and see whether the run goes on."""
        self._observer.on_evaluation(num_steps, metrics, groups)
        self.evaluations.add(num_steps, metrics)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of what runs inside to phase `name` of the current step."""
        self._observer.on_phase(name, None)
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            self._dispatcher.trace.add(name, round(began * 1e9), now_ns())
            if self._step is not None:
                self._step.phase_s[name] = self._step.phase_s.get(name, 0.0) + seconds
            self._observer.on_phase(name, seconds)

    def _ends_before(self, index: int) -> bool:
        """Whether the run ends early, before the step `index`."""
        found = self.evaluations.last_step()
        if found is not None and found[0] <= index:
            self._announce_end(found[1])
        return self._is_ending

    def _announce_end(self, sentence: str) -> None:
        """Tell the observer that the run ends early. It is told once."""
        if not self._is_ending:
            self._observer.on_early_end(sentence)
        self._is_ending = True

    def _end(self, step: LoopStep, *, last: bool) -> None:
        """Record a step that has ended, and begin its checkpoint if one is due.

        A step before which the run ends is not recorded. The checkpoint is that of the step before
        it, and may be there already.
        """
        termination = self._dispatcher.termination
        if step.why_run_ends:
            self._announce_end(step.why_run_ends)
            self._checkpoints.wait_until_complete()
            state = CheckpointState(step.index, self._run.seed)
            is_due = self._run.save_last and self._checkpoints.newest() != step.index
        else:
            self._record(step)
            state = CheckpointState(step.index + 1, self._run.seed, step.reward)
            is_due = (last and self._run.save_last) or self._is_save_due(state.next_step)
        self._step = None
        if is_due or termination.error is not None:
            self._observer.catch_up()
        if termination.error is not None:
            self._save_and_end(state)
        if self._parts and is_due:
            self._wake([*self._roles.values()])
            with self.timed("save"):
                self._checkpoints.save(state, self._parts)

    def _record(self, step: LoopStep) -> None:
        trace, ended = self._dispatcher.trace, step.began + step.elapsed_s
        trace.add("step", round(step.began * 1e9), round(ended * 1e9), step=step.index + 1)
        self._observer.on_step(step)
        trace.flush()

    def _is_save_due(self, next_step: int) -> bool:
        save_every = self._run.save_every
        is_regular = bool(save_every) and next_step % save_every == 0
        return is_regular or self.evaluations.needs_checkpoint(next_step)

    def _save_and_end(self, state: CheckpointState) -> NoReturn:
        """Save a last checkpoint in what remains of the grace period of a run that is ended from
        outside, and raise the error that ends it.
        """
        termination = self._dispatcher.termination
        if not self._parts:
            raise termination.error_with("")
        termination.lost_work = (
            f"; the checkpoint after step {state.next_step} was not whole in time"
        )
        self._wake([*self._roles.values()])
        self._checkpoints.save(state, self._parts)
        self._checkpoints.wait_until_complete()
        error = termination.error_with(
            f"; saved after step {state.next_step}, the same command goes on"
        )
        if LAUNCHER_ENV not in os.environ:
            # torchrun does not print a worker's error where torchrun itself got the signal
            print(error, flush=True)
        raise error

    def _differences(self, state: CheckpointState) -> list[str]:
        """Return why the run will not continue bit for bit; empty when it will."""
        differences = []
        for name, role in self._roles.items():
            now = role.saved_axes
            saved = state.roles.get(name, now)
            if saved != now:
                differences.append(f"{name} from {_axes_text(saved)} to {_axes_text(now)}")
        if state.seed != self._run.seed:
            differences.append(f"seed from {state.seed} to {self._run.seed}")
        for role in self._roles.values():
            differences += role.resume_differences.call()
        return differences


def _axes_text(axes: dict[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in axes.items() if size > 1) or "one rank"


def sleep_metrics(what: str, receipts: Sequence[Receipt]) -> dict[str, float]:
    """Return the metrics of one sleep or wake, of the rank that has most of each.

    The values of a step add up.
    """
    moved = max(abs(sum(one.before.values()) - sum(one.after.values())) for one in receipts)
    copied = max(one.copied_bytes for one in receipts)
    metrics = {"memory/copied_gib": copied / GIB}
    if what == "sleep":
        metrics["memory/slept_gib"] = moved / GIB
    return metrics


def span_arguments(receipts: Sequence[Receipt]) -> dict[str, Any]:
    """Return what a span of the trace says of one sleep or wake: the receipt of the rank that
    waited longest.
    """
    return asdict(max(receipts, key=lambda one: one.map_s + one.exposed_s))
