"""The one who watches a run: every phase and step goes through here to the screen and the run
folder.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from spmd_rl.observe.metrics_log import MetricsLog, drop_steps_after, read_metrics
from spmd_rl.observe.run_folder import RunFolder
from spmd_rl.observe.sinks import Sinks
from spmd_rl.report import write_report
from spmd_rl.report.curves import CurvePainter
from spmd_rl.report.plain import PlainView
from spmd_rl.report.progress import RunProgress
from spmd_rl.types.samples import Group


class View(Protocol):
    """What is shown after a step; what is shown in between is read from `RunProgress`."""

    def show(self, groups: Sequence[Group]) -> None: ...

    def close(self) -> None: ...


class _Step(NamedTuple):
    """What there is to write of a step."""

    number: int
    metrics: dict[str, float]
    groups: Sequence[Group]
    more: Callable[[], Mapping[str, float]]


class RunMonitor:
    """Steps count from 1, those of a warm-up up to 0. Lines after `resume_at`, the last step done,
    are dropped.

    The run began at `began_unix_s`; `before_s` are the seconds of phases that ended already.

    `tty` chooses the live view or plain lines; None asks the terminal. A plot is drawn every
    `plot_every_steps` and at the end, off the path of a step.
    """

    def __init__(
        self,
        run: RunFolder,
        tty: bool | None = None,
        *,
        sinks: Sinks | None = None,
        resume_at: int = 0,
        began_unix_s: float | None = None,
        before_s: Mapping[str, float] | None = None,
        plot_every_steps: int = 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._sinks = sinks or Sinks((), run.path, {})
        self._clock = clock
        self._plot_every_steps = plot_every_steps
        self._phases_s: dict[str, float] = dict(before_s or {})
        self._unwritten: _Step | None = None
        drop_steps_after(run.metrics, resume_at)
        self._rows = read_metrics(run.metrics)
        self._log = MetricsLog(run.metrics)
        self._painter = CurvePainter(run.metrics, run.curves, title=str(run.path))
        gone_s = 0.0 if began_unix_s is None else time.time() - began_unix_s
        self._progress = RunProgress(0, clock, index=resume_at, gone_s=gone_s)
        self._before: dict[str, float] = {}
        self._view = _view(
            self._progress, str(run.path), sys.stdout.isatty() if tty is None else tty
        )
        self._step_began = clock()

    def begin_warmup(self, num_steps: int) -> None:
        """The steps before step 1 begin."""
        self._progress.begin_warmup(num_steps)
        self._step_began = self._clock()

    def begin_steps(self, num_steps: int) -> None:
        """The loop begins, with step 1 or where a resumed run goes on. What came before is in the
        line of step 1.
        """
        self.catch_up()
        self._progress.begin_steps(num_steps)
        if self._progress.index == 0:
            phases = {f"before/{name}": seconds for name, seconds in self._phases_s.items()}
            self._before = phases | {"before/all": self._progress.elapsed_s}
        self._step_began, self._phases_s = self._clock(), {}

    def on_phase(self, name: str, seconds: float | None = None) -> None:
        """A phase begins, or, with `seconds`, has ended after that long."""
        if seconds is None:
            self._progress.begin_phase(name)
            return
        self._progress.end_phase()
        self._phases_s[name] = self._phases_s.get(name, 0.0) + seconds

    def on_step(
        self,
        index: int,
        metrics: Mapping[str, float],
        groups: Sequence[Group] = (),
        more: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """A step has ended, and the next one's clock starts; `catch_up` writes it, and asks for
        `more` metrics.
        """
        self.catch_up()
        self._unwritten = _Step(index, self._timed(index) | dict(metrics), groups, more)

    def catch_up(self) -> None:
        """Write the last step's line and samples and show it, if that is not done yet."""
        if self._unwritten is None:
            return
        (index, metrics, groups, more), self._unwritten = self._unwritten, None
        known = metrics | dict(more())
        full = known | _rates(known, groups)
        self._rows.append(self._log.write(index, full))
        self._sinks.write(self._rows[-1])
        if groups:
            self._run.write_samples(index, groups)
        self._progress.take(index, full)
        self._view.show(groups)
        if index > 0 and index % self._plot_every_steps == 0:
            self._painter.request()

    def leave_screen(self) -> None:
        """Draw nothing any more; what is printed stays."""
        self._view.close()

    def close(self) -> None:
        """Write the last step, draw the last curves and give the terminal back; also after a run
        that failed.
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
        """What the clock here knows of the step: its phases, and the whole; what is before step 1
        is in its line.
        """
        now = self._clock()
        whole_s, self._step_began = now - self._step_began, now
        if index <= 0:
            return {"time/warmup": whole_s}
        times = {f"time/{name}": seconds for name, seconds in self._phases_s.items()} | {
            "time/step": whole_s
        }
        times, self._before, self._phases_s = times | self._before, {}, {}
        return times


def _rates(metrics: Mapping[str, float], groups: Sequence[Group]) -> dict[str, float]:
    """The rate of generation, where there was any, and how long the slowest rank graded.

    Samples older than their step were generated while others were trained on: their phase is the
    end of that, a wait, and a step's time is what each step's samples take.
    """
    if not groups:
        return {}
    columns, rollout_s = Group.to_columns(groups), metrics.get("time/rollout", 0.0)
    reward_time_s = float(columns.reward_time_s.max())
    rates = {"time/reward": reward_time_s} if reward_time_s > 0 else {}
    if rollout_s <= 0:
        return rates
    seconds = metrics["time/step"] if metrics.get("version/lag_max", 0.0) > 0 else rollout_s
    return rates | {"rollout/tokens_per_s": len(columns.samples.tokens) / seconds}


def _view(progress: RunProgress, title: str, tty: bool) -> View:
    if not tty:
        return PlainView(progress)
    from spmd_rl.report.live import LiveView

    return LiveView(progress, title)
