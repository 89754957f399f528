"""Scores of an evaluation for people and programs: a table, and a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmd_rl.observe.atomic_write import write_atomically

Scores = Mapping[str, Mapping[str, float]]  # by set and name


def write_scores(path: Path, facts: Mapping[str, Any], scores: Scores) -> None:
    """Write the scores of all sets as JSON, beside facts such as the model's folder."""
    write_atomically(path, json.dumps({**facts, "sets": scores}, indent=1) + "\n")


def scores_table(scores: Scores) -> str:
    """Return a table with a line for each set, and a column for each score that any has."""
    names = list(dict.fromkeys(name for values in scores.values() for name in values))
    rows = [["set", *names]]
    for title, values in scores.items():
        rows.append([title, *(_text(values.get(name)) for name in names)])
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(
        "  ".join([title.ljust(first), *map(str.rjust, cells, others)]) for title, *cells in rows
    )


def _text(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) > 1 else f"{value:.4g}"
