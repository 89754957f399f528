"""Means with their standard errors: of some steps, of an evaluation, and how two compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, variance
from typing import Any, NamedTuple

from spmd_rl.report.pictures.time_axes import is_number

Row = dict[str, Any]

MIN_STANDARD_ERRORS = 2.0  # by which two means must differ to count as a change
LATEST_SHARE = 5  # the latest steps are the last fifth of a run
ERROR_OF_STEP = {"reward/mean": "reward/mean_error"}  # over the prompts of one step


class Mean(NamedTuple):
    """A mean and its standard error, NaN where it is not known."""

    value: float
    error: float

    def differs(self, other: Mean) -> bool:
        """Whether the two differ by more than their noise. False where the noise is not known."""
        return abs(self.value - other.value) > MIN_STANDARD_ERRORS * self.noise(other)

    def noise(self, other: Mean) -> float:
        """Return the standard error of the difference."""
        return math.hypot(self.error, other.error)

    def __str__(self) -> str:
        if math.isnan(self.error):
            return f"{self.value:.3g}"
        if not self.error:
            return f"{self.value:.3g} ± 0"
        digits = max(0, 1 - math.floor(math.log10(self.error)))
        is_plain = digits <= 6 and abs(self.value) < 1e6
        value = f"{self.value:.{digits}f}" if is_plain else f"{self.value:.3g}"
        return f"{value} ± {self.error:.2g}"


def num_latest(num_steps: int) -> int:
    """Return the number of steps in the last fifth of a run, at least one."""
    return max(1, num_steps // LATEST_SHARE)


def first_and_last(values: Sequence[float]) -> tuple[float, float]:
    """Return the means of the first and of the last fifth, as `fifths` divides; NaN of nothing."""
    size = num_latest(len(values))
    first, last = values[: len(values) % size + size], values[-size:]
    return (fmean(first), fmean(last)) if values else (math.nan, math.nan)


def fifths(rows: Sequence[Row], name: str) -> list[list[Row]]:
    """Return the rows that have the metric in parts of a fifth each; the first has the rest too."""
    known = [row for row in rows if is_number(row.get(name))]
    size = num_latest(len(known))
    edges = [0, *range(len(known) % size + size, len(known), size), len(known)] if known else []
    return [known[a:b] for a, b in pairwise(edges)]


def mean_of(rows: Sequence[Row], name: str) -> Mean:
    """Return the mean of a metric that all rows have.

    Its error comes from the errors within the steps, where all have one. Else it comes from the
    spread between the steps, of which there must be two.
    """
    values = [float(row[name]) for row in rows]
    within: list[Any] = [row.get(ERROR_OF_STEP.get(name, "")) for row in rows]
    if all(map(is_number, within)):
        error = math.hypot(*within) / len(rows)
    elif len(values) > 1:
        error = math.sqrt(variance(values) / len(values))
    else:
        error = math.nan
    return Mean(fmean(values), error)


def latest_mean(rows: Sequence[Row], name: str) -> Mean | None:
    """Return the mean over the last fifth of the steps that have the metric; None without any."""
    parts = fifths(rows, name)
    return mean_of(parts[-1], name) if parts else None


def evaluation_mean(row: Row, name: str) -> Mean:
    """Return a score of an evaluation with its standard error over the prompts.

    The error of a mean over the sets comes from the errors of all sets.
    """
    if is_number(row.get(f"{name}_error")):
        return Mean(float(row[name]), float(row[f"{name}_error"]))
    _, _, score = name.rpartition("/")
    sets = [key for key in row if key.startswith("eval/") and key.endswith(f"/{score}")]
    errors: list[Any] = [row.get(f"{key}_error") for key in sets if key != name]
    if name == f"eval/{score}" and errors and all(map(is_number, errors)):
        return Mean(float(row[name]), math.hypot(*errors) / len(errors))
    return Mean(float(row[name]), math.nan)
