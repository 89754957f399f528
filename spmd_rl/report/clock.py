"""When a run began, how long it took, and where its steps lie on the other axes of the charts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

Row = dict[str, Any]

TOKENS = "train/tokens"
BEFORE = "before/"  # in the names of seconds that passed before step 1


def loop(rows: Sequence[Row]) -> list[Row]:
    """The rows of the steps from 1; those of a warm-up have lower numbers."""
    return [row for row in rows if row["step"] > 0]


def before(rows: Sequence[Row]) -> dict[str, float]:
    """Seconds before step 1 by phase, and `all` of them."""
    named = [
        (name, value) for row in rows for name, value in row.items() if name.startswith(BEFORE)
    ]
    return {name.removeprefix(BEFORE): value for name, value in named if is_number(value)}


def began_unix_s(rows: Sequence[Row]) -> float | None:
    """When the run began; when its first kept step did, where no row says how long everything
    before it took.
    """
    timed = [row for row in rows if is_number(row.get("unix_s"))]
    first = next(
        (row for row in timed if is_number(row.get(f"{BEFORE}all"))), timed[0] if timed else None
    )
    if first is None:
        return None
    lengths = [first.get(name, 0.0) for name in ("time/step", "time/warmup", f"{BEFORE}all")]
    return float(first["unix_s"] - sum(filter(is_number, lengths)))


def wall_s(rows: Sequence[Row]) -> float | None:
    """Seconds from the run's beginning to the end of its last step, pauses between restarts
    included.
    """
    began_s = began_unix_s(rows)
    times = [row["unix_s"] for row in rows if is_number(row.get("unix_s"))]
    return None if began_s is None else times[-1] - began_s


def ends(parts: Sequence[Sequence[Row]]) -> dict[str, list[float]]:
    """Where each of `parts` ends, in minutes since the run began and in tokens trained on; no axis
    that rows lack.
    """
    found: dict[str, list[float]] = {}
    rows = [row for part in parts for row in part]
    began_s = began_unix_s(rows)
    if began_s is not None and all(is_number(row.get("unix_s")) for row in rows):
        found["minutes"] = [
            round((time_s - began_s) / 60, 4)
            for time_s in accumulate((_last(part) for part in parts), max)
        ]
    if any(is_number(row.get(TOKENS)) for row in rows):
        tokens = (sum(row[TOKENS] for row in part if is_number(row.get(TOKENS))) for part in parts)
        found["tokens"] = [*accumulate(tokens)]
    return found


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _last(part: Sequence[Row]) -> float:
    return float(part[-1]["unix_s"])
