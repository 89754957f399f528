"""Monitor of a run: passes its phases and steps on to the terminal view and the run folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from spmd_rl.algo.group_metrics import num_drawn_tokens
from spmd_rl.observe.metrics_log import MetricsLog, add_row, drop_steps_after, read_metrics
from spmd_rl.observe.run_folder import RunFolder
from spmd_rl.observe.sinks import Sinks
from spmd_rl.report import write_report
from spmd_rl.report.compared_tokens import closing_text
from spmd_rl.report.pictures.curve_painter import CurvePainter
from spmd_rl.report.pictures.time_axes import training_rows
from spmd_rl.report.plain_view import PlainView
from spmd_rl.report.progress import RunProgress
from spmd_rl.types.groups import Group


class ProgressView(Protocol):
    """A terminal view. It is told of steps, and reads all else from `RunProgress`."""

    def show(self, groups: Sequence[Group]) -> None: ...

    def show_evaluation(self) -> None: ...

    def close(self) -> None: ...


class _UnwrittenStep(NamedTuple):
    """A finished step whose line is not written yet."""

    number: int
    metrics: dict[str, float]
    groups: Sequence[Group]
    more_metrics: Callable[[], Mapping[str, float]]


class RunMonitor:
    """Writes the metrics and samples of each step, shows progress, and draws the curves.

    Steps count from 1, and those of a warm-up up to 0. Lines of steps after `resume_at`, the last
    finished step, are dropped. `before_s` holds the seconds of phases that have ended already.

    `tty` chooses between the live view and plain lines; None means live if stdout is a terminal.
    Curves and page are made after step 1 and every `plot_every_steps` in a background process, and
    once at the end.
    """

    def __init__(
        self,
        run: RunFolder,
        tty: bool | None = None,
        *,
        sinks: Sinks | None = None,
        resume_at: int = 0,
        start_unix_s: float | None = None,
        before_s: Mapping[str, float] | None = None,
        plot_every_steps: int = 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._sinks = sinks or Sinks((), run.path, {})
        self._clock = clock
        self._plot_every_steps = plot_every_steps
        self._phases_s: dict[str, float] = dict(before_s or {})
        self._unwritten: _UnwrittenStep | None = None
        drop_steps_after(run.metrics, resume_at)
        self._rows = read_metrics(run.metrics)
        self._log = MetricsLog(run.metrics)
        self._painter = CurvePainter(run.metrics, run.curves, title=run.path.name)
        elapsed_s = 0.0 if start_unix_s is None else time.time() - start_unix_s
        self._progress = RunProgress(0, clock, index=resume_at, elapsed_before_s=elapsed_s)
        rewards = [row.get("reward/mean") for row in training_rows(self._rows)]
        self._progress.rewards = [reward for reward in rewards if reward is not None]
        self._before_metrics: dict[str, float] = {}
        self._view = _view(
            self._progress, str(run.path), sys.stdout.isatty() if tty is None else tty
        )
        self._step_started = clock()

    def begin_warmup(self, num_steps: int) -> None:
        """Start the warm-up steps."""
        self._progress.begin_warmup(num_steps)
        self._step_started = self._clock()

    def begin_steps(self, num_steps: int) -> None:
        """Start the steps of the loop, at step 1 or where a resumed run goes on.

        The time before step 1 goes into its line.
        """
        self.catch_up()
        self._progress.begin_steps(num_steps)
        if self._progress.index == 0:
            phases = {f"before/{name}": seconds for name, seconds in self._phases_s.items()}
            self._before_metrics = phases | {"before/all": self._progress.elapsed_s}
        self._step_started, self._phases_s = self._clock(), {}

    def on_phase(self, name: str, seconds: float | None = None) -> None:
        """Note that a phase starts, or has ended after `seconds` if given."""
        if seconds is None:
            self._progress.begin_phase(name)
            return
        self._progress.end_phase()
        self._phases_s[name] = self._phases_s.get(name, 0.0) + seconds

    def on_counts(self, counts: Mapping[str, int]) -> None:
        """Show what all ranks count now. Another thread may call it."""
        self._progress.counts = counts

    def on_step(
        self,
        index: int,
        metrics: Mapping[str, float],
        groups: Sequence[Group] = (),
        more_metrics: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """Note that a step has ended, and start the clock of the next.

        `catch_up` writes the step later. Only then does it call `more_metrics`.
        """
        self.catch_up()
        self._unwritten = _UnwrittenStep(
            index, self._timed(index) | dict(metrics), groups, more_metrics
        )

    def catch_up(self) -> None:
        """Write and show the last finished step, unless that is done."""
        if self._unwritten is None:
            return
        step, self._unwritten = self._unwritten, None
        metrics = step.metrics | dict(step.more_metrics())
        metrics |= _rates(metrics, step.groups)
        self._write(step.number, metrics, step.groups)
        self._progress.record_step(step.number, metrics)
        self._view.show(step.groups)
        if step.number == 1 or (step.number > 0 and step.number % self._plot_every_steps == 0):
            self._painter.request()

    def on_evaluation(
        self, num_steps: int, metrics: Mapping[str, float], groups: Mapping[str, Sequence[Group]]
    ) -> None:
        """Write what an evaluation of the weights after `num_steps` steps found."""
        self.catch_up()
        row = self._log.write(num_steps, metrics)
        add_row(self._rows, row)
        self._sinks.write(row)
        for name, own in groups.items():
            self._run.write_samples(num_steps, own, prefix=f"eval_{name}_")
        self._progress.record_evaluation(num_steps, metrics)
        self._view.show_evaluation()

    def _write(self, index: int, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        """Write a step's metrics to the log and the sinks, and its samples to the folder."""
        self._rows.append(self._log.write(index, metrics))
        self._sinks.write(self._rows[-1])
        if groups:
            self._run.write_samples(index, groups)

    def closing_text(self) -> str:
        """Return what the end of the run says of tokens that were not compared; "" if all were."""
        return closing_text(self._rows)

    def leave_screen(self) -> None:
        """Stop drawing on the terminal. What is printed stays."""
        self._view.close()

    def close(self) -> None:
        """Write the last step, draw the final curves and report, and release the terminal.

        This is also called after a run has failed.
        """
        try:
            self.catch_up()
        finally:
            self._view.close()
            self._log.close()
            self._sinks.close()
        self._painter.finish(self._rows)
        write_report([self._run.path])

    def _timed(self, index: int) -> dict[str, float]:
        """Return the times of the step that ends now: of its phases, and of the whole step.

        Those of step 1 include the time before it.
        """
        now = self._clock()
        whole_s, self._step_started = now - self._step_started, now
        if index <= 0:
            return {"time/warmup": whole_s}
        times = {f"time/{name}": seconds for name, seconds in self._phases_s.items()}
        times["time/step"] = whole_s
        times |= self._before_metrics
        self._before_metrics, self._phases_s = {}, {}
        return times


def _rates(metrics: Mapping[str, float], groups: Sequence[Group]) -> dict[str, float]:
    """Return generated tokens per second, and the time that reward functions took in all.

    If samples are older than their step, they were generated while the trainer worked. The rollout
    phase is then only the wait for them, so the rate is taken over the whole step.
    """
    if not groups:
        return {}
    columns, rollout_s = Group.to_columns(groups), metrics.get("time/rollout", 0.0)
    reward_time_s = float(columns.reward_time_s.sum())
    rates = {"time/reward": reward_time_s} if reward_time_s > 0 else {}
    if rollout_s <= 0:
        return rates
    seconds = metrics["time/step"] if metrics.get("version/lag_max", 0.0) > 0 else rollout_s
    return rates | {"rollout/tokens_per_s": num_drawn_tokens(columns.samples) / seconds}


def _view(progress: RunProgress, title: str, tty: bool) -> ProgressView:
    if not tty:
        return PlainView(progress)
    from spmd_rl.report.live_view import LiveView

    return LiveView(progress, title)
