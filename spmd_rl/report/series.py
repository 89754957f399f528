"""A run's metrics, as curves of bounded size and as final figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from spmd_rl.observe.metrics import METRIC_OF_NAME
from spmd_rl.report.clock import BEFORE, ends, is_number, loop

Row = dict[str, Any]

MAX_POINTS = 600


@dataclass(frozen=True)
class Figure:
    """One number that stands for a whole run. `better` is +1 where more is better, -1 where less
    is, else 0.
    """

    label: str
    metric: str
    how: str
    better: int = 0


FIGURES = (
    Figure("reward", "reward/mean", "last twentieth", 1),
    Figure("prompts never solved", "reward/solve_none", "last twentieth"),
    Figure("response tokens", "rollout/response_tokens_mean", "last twentieth"),
    Figure("entropy", "train/entropy", "last twentieth"),
    Figure("mismatched tokens", "onpolicy/mismatched_tokens", "total", -1),
    Figure("compared tokens", "onpolicy/compared_tokens", "total"),
    Figure("max |Δ log-prob|", "onpolicy/max_abs_dlogp", "largest", -1),
    Figure("time per step", "time/step", "median"),
    Figure("rollout speed", "rollout/tokens_per_s", "median", 1),
    Figure("train speed", "perf/train_tokens_per_s", "median", 1),
    Figure("MFU", "perf/mfu", "median", 1),
    Figure("controller's share", "perf/controller_share", "median"),
    Figure("peak device memory", "memory/gpu_peak_gib", "largest"),
)

# says nothing in a step where that one is 0
AMONG = {"onpolicy/mismatched_tokens": "onpolicy/compared_tokens"}

CLEARLY = 0.05  # by how much of the larger one two values must differ to say that one is better


def curves(rows: Sequence[Row], max_points: int = MAX_POINTS) -> dict[str, Any]:
    """Every metric at no more than `max_points` points.

    A point covers the steps `first` to `last` and has their mean; where it covers several it has
    their lowest and highest value too, so that a lone spike is never averaged away. `ends` says
    where it ends on the other axes.
    """
    num_points = min(len(rows), max_points)
    edges = (
        [i * len(rows) // num_points for i in range(num_points)] + [len(rows)] if num_points else []
    )
    parts = [rows[a:b] for a, b in pairwise(edges)]
    return {
        "num_steps": len(loop(rows)),
        "first": [part[0]["step"] for part in parts],
        "last": [part[-1]["step"] for part in parts],
        "ends": ends(parts),
        "columns": {name: _column(parts, name) for name in names(rows)},
    }


def names(rows: Iterable[Row]) -> list[str]:
    """The metrics that have a value somewhere: the project's in their order, then the user's own."""
    found = {
        name for row in rows for name in row if _is_known(row, name) and not name.startswith(BEFORE)
    }
    found -= {"step", "unix_s"}
    return [name for name in METRIC_OF_NAME if name in found] + sorted(
        found - METRIC_OF_NAME.keys()
    )


def figures(rows: Sequence[Row]) -> list[float | None]:
    """The run's value for each of FIGURES; None where it has none."""
    return [_figure(rows, figure) for figure in FIGURES]


def winner(figure: Figure, values: Sequence[float | None]) -> int | None:
    """Which of several runs has the best value, clearly better than every other; None where none
    has.
    """
    known = sorted(
        ((figure.better * value, i) for i, value in enumerate(values) if value is not None),
        reverse=True,
    )
    if not figure.better or len(known) < 2:
        return None
    (best, index), (second, _) = known[:2]
    return index if best - second >= CLEARLY * max(abs(best), abs(second)) > 0 else None


def num_latest(num_steps: int) -> int:
    """How many steps a run's last twentieth are."""
    return max(1, num_steps // 20)


def _latest(values: list[float]) -> float:
    return statistics.fmean(values[-num_latest(len(values)) :])


_HOW: dict[str, Callable[[list[float]], float]] = {
    "last twentieth": _latest,
    "total": sum,
    "largest": max,
    "median": statistics.median,
}


def _figure(rows: Sequence[Row], figure: Figure) -> float | None:
    values = [row[figure.metric] for row in loop(rows) if _is_known(row, figure.metric)]
    return _short(_HOW[figure.how](values)) if values else None


def _column(parts: list[Sequence[Row]], name: str) -> dict[str, list[float | None]]:
    known = [[row[name] for row in part if _is_known(row, name)] for part in parts]
    column = {"mean": [_short(statistics.fmean(values)) if values else None for values in known]}
    if any(len(part) > 1 for part in parts):
        column["low"] = [_short(min(values, default=None)) for values in known]
        column["high"] = [_short(max(values, default=None)) for values in known]
    return column


def _is_known(row: Row, name: str) -> bool:
    return is_number(row.get(name)) and row.get(AMONG.get(name, "")) != 0


def _short(value: float | None) -> float | None:
    """Seven significant digits: more than a page can show."""
    if value is None or float(value).is_integer():
        return value if value is None else int(value)
    return float(f"{value:.7g}")
