"""`curves.png`: the curves of a run, drawn from its metrics.

Its panels are those of `picture_panels.py` on which something moves. They fill each row.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from spmd_rl.observe.atomic_write import atomic_file
from spmd_rl.report.pictures.curve_axes import INK, Rows, style_axes
from spmd_rl.report.pictures.picture_panels import mismatch_text, panels_of
from spmd_rl.report.verdicts.main_scores import main_score

MAX_ACROSS = 3  # panels in a row


def draw(rows: Rows, path: Path, title: str) -> None:
    """Write the picture atomically, if the rows have any value."""
    figure = picture(rows, title)
    if figure is None:
        return
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=110)


def picture(rows: Rows, title: str) -> Any:
    """Return the matplotlib figure of the steps from 1, or None if there is nothing to draw.

    The title also says how many tokens differ between trainer and engine.
    """
    evaluated = [row for row in rows if row["step"] >= 0 and main_score(row)]
    rows = [row for row in rows if row["step"] > 0]
    panels = panels_of(rows, evaluated)
    if not panels:
        return None
    sizes = _rows_of(len(panels))
    figure = _empty_figure(sizes, " · ".join(filter(None, [title, mismatch_text(rows)])))
    grid = figure.add_gridspec(len(sizes), math.lcm(*sizes))
    places = [
        grid[row, across * (grid.ncols // size) : (across + 1) * (grid.ncols // size)]
        for row, size in enumerate(sizes)
        for across in range(size)
    ]
    steps = np.array([row["step"] for row in rows])
    for place, panel in zip(places, panels, strict=True):
        axes = figure.add_subplot(place)
        style_axes(axes, steps)
        panel(axes, steps, rows)
    return figure


def _rows_of(num_panels: int) -> list[int]:
    """Return how many panels each row has, so that no row has a hole."""
    down = math.ceil(num_panels / MAX_ACROSS)
    return [num_panels // down + (row < num_panels % down) for row in range(down)]


def _empty_figure(sizes: list[int], title: str) -> Any:
    """Return a figure without panels, large enough for rows of these many panels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = (4.4 * max(sizes), 0.3 + 3.2 * len(sizes))
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK)
    return figure
