"""The file `metrics.jsonl` of a run: writing it, reading it, and cutting it back to resume."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spmd_rl.errors import DataError
from spmd_rl.observe.atomic_write import errors_naming_file, open_append, write_atomically
from spmd_rl.observe.jsonl import numbered_lines, parse_finite_json


class MetricsLog:
    """Writer of `metrics.jsonl`: one line a step, and one for each evaluation.

    A line is in the file once `write` returns. A value that is not finite is written as null, with
    a warning, because JSON has no NaN.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_append(path)

    def write(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Append the line of `step`, and return it as `read_metrics` would.

        The line has the time of writing as `unix_s`.
        Raises: DataError for a metric that is not a number, or is called `step` or `unix_s`.
        """
        non_finite = _non_finite(step, metrics)
        if non_finite:
            warnings.warn(
                f"step {step}: not finite, so written as null: {', '.join(non_finite)}",
                stacklevel=2,
            )
        row: dict[str, Any] = {"step": step, "unix_s": round(time.time(), 3)}
        if taken := row.keys() & metrics.keys():
            raise DataError(
                f"step {step}",
                f"logged {min(taken)!r}, which is reserved: choose another name",
            )
        row |= {name: _json_number(value) for name, value in metrics.items()}
        self._append(row)
        return row

    def _append(self, row: dict[str, Any]) -> None:
        with errors_naming_file(self.path):
            self._file.write((json.dumps(row, allow_nan=False) + "\n").encode())
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def _non_finite(step: int, metrics: Mapping[str, float]) -> list[str]:
    """Return the names of the metrics that are not finite, sorted.

    Raises: DataError for a metric that is not a number.
    """
    try:
        return sorted(name for name, value in metrics.items() if not math.isfinite(value))
    except TypeError:
        raise DataError(
            f"step {step}",
            f"logged metrics must be numbers: {', '.join(_non_numbers(metrics))}",
        ) from None


def _non_numbers(metrics: Mapping[str, object]) -> Iterator[str]:
    for name, value in metrics.items():
        try:
            math.isfinite(value)  # type: ignore[arg-type]
        except TypeError:
            yield f"{name} ({type(value).__name__})"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the steps of a `metrics.jsonl` as dicts. Lines of one step in a row are one dict.

    A damaged line is skipped with a warning. A last line without its newline is left out.
    """
    rows: list[dict[str, Any]] = []
    for number, line in numbered_lines(path) if path.exists() else ():
        if line.endswith(b"\n"):
            try:
                add_row(rows, _row(f"{path}:{number}", line))
            except DataError as error:
                warnings.warn(f"{error}; this line is skipped", stacklevel=2)
    return rows


def add_row(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Add a line's row to `rows`, or to the last of them if that is of the same step."""
    if rows and rows[-1]["step"] == row["step"]:
        rows[-1] = row | rows[-1]
    else:
        rows.append(row)


def has_steps(path: Path) -> bool:
    """Whether the file has a step from 1, or an unreadable line.

    Warm-up steps do not count: a run that stopped in its warm-up begins again.
    """
    try:
        return path.exists() and any(
            _row(str(path), line)["step"] > 0 for _, line in numbered_lines(path)
        )
    except DataError:
        return True


def _row(where: str, line: bytes) -> dict[str, Any]:
    row = parse_finite_json(where, line)
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise DataError(where, "not a line of metrics: it has no step")
    return row


def drop_steps_after(path: Path, step: int) -> None:
    """Drop the lines after `step`, which a resumed run writes again; all lines if `step` is 0."""
    kept = [json.dumps(row) + "\n" for row in read_metrics(path) if 0 < step >= row["step"]]
    write_atomically(path, "".join(kept))


def _json_number(value: float) -> float | int | None:
    """Return the number as it is written: None for one that JSON does not have."""
    if not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() and abs(value) < 2**53 else float(value)
