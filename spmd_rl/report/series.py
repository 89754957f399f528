"""Metrics of a run, as curves with a bounded number of points and as key figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from spmd_rl.observe.metrics import METRIC_OF_NAME
from spmd_rl.report.means import MIN_STANDARD_ERRORS, Mean, evaluation_mean, latest_mean, num_latest
from spmd_rl.report.panels import TABLES
from spmd_rl.report.pictures.time_axes import BEFORE, is_number, part_ends, training_rows

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


class Figure(NamedTuple):
    """The value of a key figure, and its standard error where that is known."""

    value: float
    error: float | None


LATEST, LAST = "last fifth", "last"
KEY_FIGURES = tuple(KeyFigure(**table) for table in TABLES["figures"])

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
        "latest": _latest(rows),
    }


def _latest(rows: Sequence[Row]) -> dict[str, float]:
    """Return each metric's mean over the last fifth of the steps, which a legend shows.

    A metric that some steps lack is left out, unless it is a time, of which they took none.
    """
    steps = training_rows(rows)
    latest = steps[-num_latest(len(steps)) :]
    means = {}
    for name in metric_names(steps):
        values = [row[name] for row in latest if _is_known(row, name)]
        if len(values) == len(latest) or name.startswith("time/"):
            means[name] = _rounded(math.fsum(values) / len(latest))
    return means


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


def key_figures(rows: Sequence[Row]) -> list[Figure | None]:
    """Return the run's value for each of KEY_FIGURES, None if it has none."""
    return [_figure(rows, figure) for figure in KEY_FIGURES]


def winner(figure: KeyFigure, values: Sequence[Figure | None]) -> int | None:
    """Return which run has a value that is better than all others, if any.

    It is better by `MIN_MARGIN`, and by more than the noise that is known.
    """
    known = [(i, value) for i, value in enumerate(values) if value is not None]
    if not figure.better or len(known) < 2:
        return None
    known.sort(key=lambda one: figure.better * one[1].value, reverse=True)
    (index, best), (_, second) = known[:2]
    margin, largest = abs(best.value - second.value), max(abs(best.value), abs(second.value))
    noise = math.hypot(best.error or 0.0, second.error or 0.0)
    is_clear = margin >= MIN_MARGIN * largest > 0 and margin > MIN_STANDARD_ERRORS * noise
    return index if is_clear else None


_AGGREGATES: dict[str, Callable[[list[float]], float]] = {
    "total": sum,
    "largest": max,
    "median": statistics.median,
}


def _figure(rows: Sequence[Row], figure: KeyFigure) -> Figure | None:
    # an evaluation before the first step counts too
    figure_rows = rows if figure.how == LAST else training_rows(rows)
    known = [row for row in figure_rows if _is_known(row, figure.metric)]
    if not known:
        return None
    if figure.how == LATEST:
        return _with_error(latest_mean(known, figure.metric))
    if figure.how == LAST:
        return _with_error(evaluation_mean(known[-1], figure.metric))
    values = [row[figure.metric] for row in known]
    return Figure(_rounded(_AGGREGATES[figure.how](values)), None)


def _with_error(mean: Mean | None) -> Figure | None:
    if mean is None:
        return None
    return Figure(_rounded(mean.value), None if math.isnan(mean.error) else _rounded(mean.error))


def _column(parts: list[Sequence[Row]], name: str) -> dict[str, list[float | None]]:
    known = [[row[name] for row in part if _is_known(row, name)] for part in parts]
    column = {"mean": [_rounded(statistics.fmean(values)) if values else None for values in known]}
    if any(len(part) > 1 for part in parts):
        column["low"] = [_rounded(min(values)) if values else None for values in known]
        column["high"] = [_rounded(max(values)) if values else None for values in known]
    return column


def _is_known(row: Row, name: str) -> bool:
    return is_number(row.get(name)) and row.get(DENOMINATORS.get(name, "")) != 0


def _rounded(value: float) -> float:
    """Round to seven significant digits, which is more than the page shows."""
    return int(value) if float(value).is_integer() else float(f"{value:.7g}")
