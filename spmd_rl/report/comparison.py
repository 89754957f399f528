"""Comparison of runs in a terminal: the settings that differ, and the key figures."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_comparison(data: dict[str, Any]) -> None:
    """Print the settings that differ and the key figures of the runs that `gather` returned."""
    console = Console()
    if data["differences"]:
        console.print(_settings_table(data))
    else:
        console.print("All runs have the same settings.")
    console.print(_figures_table(data))


def _settings_table(data: dict[str, Any]) -> Table:
    """Return the settings that differ, with a column for each run."""
    table = _table("setting", data["runs"])
    for key, values in data["differences"]:
        table.add_row(Text(key), *(Text("-" if value is None else value) for value in values))
    return table


def _figures_table(data: dict[str, Any]) -> Table:
    """Return the key figures that any run has, with a column for each run."""
    runs = data["runs"]
    table = _table("figure", runs)
    for i, figure in enumerate(data["figures"]):
        values = [run["figures"][i] for run in runs]
        if any(value is not None for value in values):
            label = f"{figure['label']} ({figure['how']})"
            unit = data["metrics"][figure["metric"]]["unit"]
            if unit in figure["label"].split():  # such as tokens
                unit = ""
            table.add_row(label, *(_with_unit(value, unit) for value in values))
    return table


def as_number(value: float | None) -> str:
    """Return the number with four significant digits, or all digits of a whole number."""
    if value is None:
        return "-"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:,.4g}" if abs(value) >= 0.001 else f"{value:.2e}"


def _with_unit(value: float | None, unit: str) -> str:
    return as_number(value) if value is None or not unit else f"{as_number(value)} {unit}"


def _table(what: str, runs: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2))
    table.add_column(what)
    for run in runs:
        table.add_column(Text(run["name"]), justify="right", overflow="fold")
    return table
