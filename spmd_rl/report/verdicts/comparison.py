"""Comparison of runs in a terminal: the settings that differ, the key figures, who is ahead."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_comparison(data: dict[str, Any]) -> None:
    """Print what `gather` returned of the runs: settings that differ, figures, and who is ahead."""
    console = Console(color_system=None)  # what is printed may hold no control sequence
    if data["differences"]:
        console.print(_settings_table(data))
    else:
        console.print("All runs have the same settings.")
    console.print(_figures_table(data))
    for finding in data["comparisons"]:
        console.print(Text(finding["text"]))


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


def _with_unit(figure: dict[str, float | None] | None, unit: str) -> str:
    """Return the value of a figure with its standard error, if that is known, and its unit."""
    if figure is None:
        return as_number(None)
    error = "" if figure["error"] is None else f"± {figure['error']:.2g}"
    return " ".join(filter(None, [as_number(figure["value"]), error, unit]))


def _table(what: str, runs: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2))
    table.add_column(what)
    for run in runs:
        table.add_column(Text(run["name"]), justify="right", overflow="fold")
    return table
