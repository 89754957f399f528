"""Time axes of the charts: when a run started, and its steps in minutes and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

Row = dict[str, Any]

TOKENS = "train/tokens"
BEFORE = "before/"  # prefix of metrics: seconds that passed before step 1


def training_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the steps from 1, without those of a warm-up."""
    return [row for row in rows if row["step"] > 0]


def seconds_before_step_1(rows: Sequence[Row]) -> dict[str, float]:
    """Return the seconds before step 1: by phase, and in all as `all`."""
    named = [
        (name, value) for row in rows for name, value in row.items() if name.startswith(BEFORE)
    ]
    return {name.removeprefix(BEFORE): value for name, value in named if is_number(value)}


def start_unix_s(rows: Sequence[Row]) -> float | None:
    """Return when the run started.

    If no row has the seconds before step 1, that is when the first recorded step started.
    """
    timed = [row for row in rows if is_number(row.get("unix_s"))]
    first = next(
        (row for row in timed if is_number(row.get(f"{BEFORE}all"))), timed[0] if timed else None
    )
    if first is None:
        return None
    durations = [first.get(name, 0.0) for name in ("time/step", "time/warmup", f"{BEFORE}all")]
    return float(first["unix_s"] - sum(filter(is_number, durations)))


def wall_s(rows: Sequence[Row]) -> float | None:
    """Return the seconds from the start of the run to the end of its last step.

    Pauses between restarts are included.
    """
    start_s = start_unix_s(rows)
    times = [row["unix_s"] for row in rows if is_number(row.get("unix_s"))]
    return None if start_s is None else times[-1] - start_s


def part_ends(parts: Sequence[Sequence[Row]]) -> dict[str, list[float]]:
    """Return where each part of the rows ends, in minutes since the start and in trained tokens.

    An axis for which the rows have no values is left out.
    """
    axes: dict[str, list[float]] = {}
    rows = [row for part in parts for row in part]
    start_s = start_unix_s(rows)
    if start_s is not None and all(is_number(row.get("unix_s")) for row in rows):
        axes["minutes"] = _minutes_at_ends(parts, start_s)
    if any(is_number(row.get(TOKENS)) for row in rows):
        axes["tokens"] = _tokens_at_ends(parts)
    return axes


def _minutes_at_ends(parts: Sequence[Sequence[Row]], start_s: float) -> list[float]:
    """Return the minutes from the start to the end of each part. They never decrease."""
    times_s = accumulate((float(part[-1]["unix_s"]) for part in parts), max)
    return [round((time_s - start_s) / 60, 4) for time_s in times_s]


def _tokens_at_ends(parts: Sequence[Sequence[Row]]) -> list[float]:
    """Return the number of tokens trained by the end of each part."""
    tokens = (sum(row[TOKENS] for row in part if is_number(row.get(TOKENS))) for part in parts)
    return [*accumulate(tokens)]


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
