"""Comparison of runs in a terminal: the settings that differ, and the key figures."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_comparison(data: dict[str, Any]) -> None:
    """Print the settings that differ and the key figures of the runs that `gather` returned."""
    runs = data["runs"]
    settings = _table("setting", runs)
    for key, values in data["differences"]:
        settings.add_row(Text(key), *(Text("-" if value is None else value) for value in values))
    results = _table("figure", runs)
    for i, figure in enumerate(data["figures"]):
        values = [run["figures"][i] for run in runs]
        if any(value is not None for value in values):
            label = f"{figure['label']} ({figure['how']})"
            results.add_row(label, *map(as_number, values))
    console = Console()
    console.print(settings if data["differences"] else "All runs have the same settings.")
    console.print(results)


def as_number(value: float | None) -> str:
    """Return the number with four significant digits, or all digits of a whole number."""
    if value is None:
        return "-"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:,.4g}" if abs(value) >= 0.001 else f"{value:.2e}"


def _table(what: str, runs: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2))
    table.add_column(what)
    for run in runs:
        table.add_column(Text(run["name"]), justify="right", overflow="fold")
    return table
