"""Evaluations: what they found of the metric `run.best`, which checkpoint is best by it, and when a
run ends early because it no longer gets better.

All of it is read from metrics.jsonl, so a resumed run decides as the undisturbed one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from spmd_rl.config.load import read_toml
from spmd_rl.config.run import RunConfig
from spmd_rl.controller.run.checkpoints import CheckpointState, best_first
from spmd_rl.errors import ConfigError
from spmd_rl.observe.metrics_log import read_metrics

LESS_IS_BETTER = ("loss", "perplexity")  # the last part of a metric's name

Scores = Mapping[int, float]  # by the steps of the evaluated weights; more is better


class Schedule(Protocol):
    """When a run evaluates."""

    def is_planned(self, num_steps: int) -> bool:
        """Return whether the weights after `num_steps` steps are to be evaluated in the loop."""


class Evaluations:
    """The evaluations of one run, by the settings `run.best` and `run.patience`."""

    def __init__(self, run: RunConfig) -> None:
        self._metric, self._patience = run.best, run.patience
        self._file = run.path / "metrics.jsonl"
        self._schedule: Schedule | None = None
        self._scores: dict[int, float] = {}

    @property
    def scores(self) -> Scores | None:
        """What is known so far; None without `run.best`."""
        return self._scores if self._metric else None

    def plan(self, schedule: Schedule, sets: Sequence[str]) -> None:
        """Note when the run evaluates, and which sets. Raises: ConfigError for a set of `run.best`
        that is not among them.
        """
        self._schedule = schedule if sets else None
        name = self._metric.removeprefix("eval/").rpartition("/")[0]
        if sets and name and name not in sets:
            raise ConfigError(
                f"run.best = {self._metric!r}: there is no evaluation set {name!r}, only "
                f"{', '.join(sets)}"
            )

    def load(self, num_steps: int) -> None:
        """Read the evaluations before this start of a run of `num_steps` steps, once the lines of
        later steps are dropped.

        Raises: ConfigError where `run.best` is set and the run has no evaluations, or
        `run.patience` is and it has none after its first step.
        """
        if not self._metric:
            return
        if self._schedule is None:
            raise ConfigError(
                f"run.best = {self._metric!r} goes by evaluations, and this run has none: set "
                "eval.data and eval.every"
            )
        is_planned = self._schedule.is_planned
        if self._patience and num_steps > 1 and not any(map(is_planned, range(1, num_steps))):
            raise ConfigError(
                f"run.patience = {self._patience} counts evaluations between the first step and "
                "the last, and there are none: set eval.every"
            )
        self._scores = _scores(self._file, self._metric)

    def needs_checkpoint(self, num_steps: int) -> bool:
        """Return whether the weights after `num_steps` steps may turn out to be the best."""
        planned = self._schedule is not None and self._schedule.is_planned(num_steps)
        return bool(self._metric) and planned

    def add(self, num_steps: int, metrics: Mapping[str, float]) -> None:
        """Note what an evaluation found. Raises: ConfigError where it lacks `run.best`."""
        if not self._metric:
            return
        if self._metric not in metrics:
            found = ", ".join(sorted(metrics))
            raise ConfigError(
                f"run.best = {self._metric!r} is no metric of the evaluation, which has {found}"
            )
        self._scores[num_steps] = _score(self._metric, metrics[self._metric])

    def last_step(self) -> tuple[int, str] | None:
        """Return the step after which the run ends early, and a sentence that says why.

        It is the step that was under way at the first evaluation that made `run.patience` of them
        without a better one. None while there is none.
        """
        if not (self._metric and self._patience):
            return None
        best, since = -1, 0
        for num_steps, score in sorted(self._scores.items()):
            if best < 0 or score > self._scores[best]:
                best, since = num_steps, 0
                continue
            since += 1
            if since == self._patience:
                return num_steps + 1, (
                    f"{self._metric} was best after step {best}, with {abs(self._scores[best]):g}, "
                    f"and not better in {since} evaluations since: the run ends after step "
                    f"{num_steps + 1} (run.patience)"
                )
        return None


def best_of_run(run: Path, saved: Mapping[Path, CheckpointState]) -> list[Path]:
    """Return the checkpoints of the run in this folder, the best by its own `run.best` first.

    Raises: ConfigError for a config that cannot be read.
    """
    file = run / "config.toml"
    settings: dict[str, Any] = read_toml(file).get("run", {}) if file.is_file() else {}
    metric = settings.get("best", "")
    return best_first(saved, _scores(run / "metrics.jsonl", metric) if metric else None)


def _scores(file: Path, metric: str) -> dict[int, float]:
    rows = read_metrics(file)
    return {row["step"]: _score(metric, row[metric]) for row in rows if metric in row}


def _score(metric: str, value: float | None) -> float:
    """Return a metric's value such that more is better. One that is no number is the worst."""
    if value is None or not math.isfinite(value):
        return -math.inf
    return -value if metric.rpartition("/")[2] in LESS_IS_BETTER else value
