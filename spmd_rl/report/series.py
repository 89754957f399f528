"""Metrics of a run, as curves with a bounded number of points and as key figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from spmd_rl.observe.metrics import METRIC_OF_NAME
from spmd_rl.report.time_axes import BEFORE, is_number, part_ends, training_rows

Row = dict[str, Any]

MAX_POINTS = 600


@dataclass(frozen=True)
class KeyFigure:
    """One number for a whole run: `metric`, aggregated as `how` says.

    `better` is +1 if more is better, -1 if less is better, and 0 if neither.
    """

    label: str
    metric: str
    how: str
    better: int = 0


KEY_FIGURES = (
    KeyFigure("reward", "reward/mean", "mean of last 5 %", 1),
    KeyFigure("reward in evaluation", "eval/reward", "last", 1),
    KeyFigure("loss in evaluation", "eval/loss", "last", -1),
    KeyFigure("accuracy in evaluation", "eval/accuracy", "last", 1),
    KeyFigure("prompts without reward", "reward/solve_none", "mean of last 5 %"),
    KeyFigure("response tokens", "rollout/response_tokens_mean", "mean of last 5 %"),
    KeyFigure("entropy", "train/entropy", "mean of last 5 %"),
    KeyFigure("mismatched tokens", "onpolicy/mismatched_tokens", "total", -1),
    KeyFigure("compared tokens", "onpolicy/compared_tokens", "total"),
    KeyFigure("max |Δ log-prob|", "onpolicy/max_abs_dlogp", "largest", -1),
    KeyFigure("time per step", "time/step", "median"),
    KeyFigure("rollout speed", "rollout/tokens_per_s", "median", 1),
    KeyFigure("train speed", "perf/train_tokens_per_s", "median", 1),
    KeyFigure("MFU", "perf/mfu", "median", 1),
    KeyFigure("controller's share", "perf/controller_share", "median"),
    KeyFigure("peak device memory", "memory/gpu_peak_gib", "largest"),
    KeyFigure("memory given back in a step", "memory/slept_gib", "median"),
    KeyFigure("copies for sleep in a step", "memory/copied_gib", "median"),
)

# a metric that has no meaning in a step where its denominator is 0
DENOMINATORS = {"onpolicy/mismatched_tokens": "onpolicy/compared_tokens"}

MIN_MARGIN = 0.05  # relative difference from which one value counts as better


def curves(rows: Sequence[Row], max_points: int = MAX_POINTS) -> dict[str, Any]:
    """Return every metric with at most `max_points` points.

    A point covers the steps `first` to `last` and has their mean. If it covers several steps, it
    also has their lowest and highest value, so that no spike is averaged away. `ends` says where it
    ends on the other axes.
    """
    parts = _equal_parts(rows, max_points)
    return {
        "num_steps": len(training_rows(rows)),
        "first": [part[0]["step"] for part in parts],
        "last": [part[-1]["step"] for part in parts],
        "ends": part_ends(parts),
        "columns": {name: _column(parts, name) for name in metric_names(rows)},
    }


def _equal_parts(rows: Sequence[Row], max_parts: int) -> list[Sequence[Row]]:
    """Return the rows in at most `max_parts` consecutive parts of about equal length."""
    num_parts = min(len(rows), max_parts)
    edges = [i * len(rows) // num_parts for i in range(num_parts)] + [len(rows)]
    return [rows[a:b] for a, b in pairwise(edges)]


def metric_names(rows: Iterable[Row]) -> list[str]:
    """Return the metrics that have a value: known ones in their order, then the recipe's own."""
    found = {
        name for row in rows for name in row if _is_known(row, name) and not name.startswith(BEFORE)
    }
    found -= {"step", "unix_s"}
    return [name for name in METRIC_OF_NAME if name in found] + sorted(
        found - METRIC_OF_NAME.keys()
    )


def key_figures(rows: Sequence[Row]) -> list[float | None]:
    """Return the run's value for each of KEY_FIGURES, None if it has none."""
    return [_figure(rows, figure) for figure in KEY_FIGURES]


def winner(figure: KeyFigure, values: Sequence[float | None]) -> int | None:
    """Return which run has a value that is better than all others by `MIN_MARGIN`, if any."""
    scores = [(figure.better * value, i) for i, value in enumerate(values) if value is not None]
    if not figure.better or len(scores) < 2:
        return None
    (best, index), (second, _) = sorted(scores, reverse=True)[:2]
    return index if best - second >= MIN_MARGIN * max(abs(best), abs(second)) > 0 else None


def num_latest(num_steps: int) -> int:
    """Return the number of steps in the last twentieth of a run."""
    return max(1, num_steps // 20)


def _latest(values: list[float]) -> float:
    return statistics.fmean(values[-num_latest(len(values)) :])


_AGGREGATES: dict[str, Callable[[list[float]], float]] = {
    "mean of last 5 %": _latest,
    "last": lambda values: values[-1],
    "total": sum,
    "largest": max,
    "median": statistics.median,
}


def _figure(rows: Sequence[Row], figure: KeyFigure) -> float | None:
    # an evaluation before the first step counts too
    figure_rows = rows if figure.how == "last" else training_rows(rows)
    values = [row[figure.metric] for row in figure_rows if _is_known(row, figure.metric)]
    return _rounded(_AGGREGATES[figure.how](values)) if values else None


def _column(parts: list[Sequence[Row]], name: str) -> dict[str, list[float | None]]:
    known = [[row[name] for row in part if _is_known(row, name)] for part in parts]
    column = {"mean": [_rounded(statistics.fmean(values)) if values else None for values in known]}
    if any(len(part) > 1 for part in parts):
        column["low"] = [_rounded(min(values, default=None)) for values in known]
        column["high"] = [_rounded(max(values, default=None)) for values in known]
    return column


def _is_known(row: Row, name: str) -> bool:
    return is_number(row.get(name)) and row.get(DENOMINATORS.get(name, "")) != 0


def _rounded(value: float | None) -> float | None:
    """Round to seven significant digits, which is more than the page shows."""
    if value is None or float(value).is_integer():
        return value if value is None else int(value)
    return float(f"{value:.7g}")
