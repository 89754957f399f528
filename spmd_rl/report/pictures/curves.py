"""`curves.png`: the main charts of the report page, drawn by matplotlib."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spmd_rl.observe.atomic_write import atomic_file
from spmd_rl.report.compared_tokens import total_text
from spmd_rl.report.panels import PANEL_OF_METRIC
from spmd_rl.report.pictures.charts import OTHER_TIME, STEP_TIME, Chart, main_charts
from spmd_rl.report.pictures.colours import CODES
from spmd_rl.report.series import curves

Rows = Sequence[dict[str, Any]]
Values = NDArray[np.float64]

MAX_CHARTS, MAX_ACROSS = 15, 3  # charts in all, and in a row
MAX_POINTS = 100  # of a line; a band shows the lowest and the highest steps of a point
MAX_LABEL = 45  # characters of a name in one line of a legend
DECADES = 3  # that positive values span, from which their axis is logarithmic


def draw(rows: Rows, path: Path, title: str) -> None:
    """Write the picture atomically, if the rows have any value."""
    figure = picture(rows, title)
    if figure is None:
        return
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=110)


def picture(rows: Rows, title: str) -> Any:
    """Return the matplotlib figure, or None if there is nothing to draw.

    The title also says how many tokens differ between trainer and engine.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    reduced = curves(rows, MAX_POINTS)
    charts = main_charts({"name": title, "curves": reduced})[:MAX_CHARTS]
    if not charts:
        return None
    down = math.ceil(len(charts) / MAX_ACROSS)
    across = math.ceil(len(charts) / down)
    figure = Figure(figsize=(4.4 * across, 0.4 + 3.2 * down), layout="constrained")
    FigureCanvasAgg(figure)
    heading = " · ".join(filter(None, [title, total_text(rows)]))
    figure.suptitle(heading, x=0.01, ha="left", fontweight="bold")
    figure.supxlabel("step", fontsize=8)
    for number, chart in enumerate(charts, 1):
        _draw_chart(figure.add_subplot(down, across, number), chart, reduced)
    return figure


def _draw_chart(axes: Any, chart: Chart, reduced: dict[str, Any]) -> None:
    _label(axes, chart["title"], chart["unit"])
    draw_lines = _draw_stack if chart["stacked"] else _draw_lines
    _set_scale(axes, chart, draw_lines(axes, chart, reduced))
    axes.xaxis.get_major_locator().set_params(integer=True)
    if len(chart["lines"]) > 1:  # below the axes, where it hides no line
        longest = max(len(line["label"]) for line in chart["lines"])
        ncols = max(1, MAX_LABEL // (4 + longest))
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.1), ncols=ncols, fontsize=8)


def _label(axes: Any, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_ylabel(unit, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)


def _draw_stack(axes: Any, chart: Chart, reduced: dict[str, Any]) -> Values:
    """Draw the lines on each other, and return their sums."""
    means = np.stack([_values(reduced["columns"], line["metric"]) for line in chart["lines"]])
    labels = [line["label"] for line in chart["lines"]]
    colors = [CODES[line["colour"]] for line in chart["lines"]]
    known = np.isfinite(means).any(0)  # steps before the first of the loop have no such times
    parts = np.nan_to_num(means[:, known])
    axes.stackplot(np.array(reduced["last"])[known], parts, labels=labels, colors=colors)
    sums: Values = parts.sum(0)
    return sums


def _draw_lines(axes: Any, chart: Chart, reduced: dict[str, Any]) -> Values:
    """Draw the lines with their bands, and return all their values.

    A later line is thinner, so that an equal one is seen behind it.
    """
    widths = range(len(chart["lines"]), 0, -1)
    drawn = zip(chart["lines"], widths, strict=True)
    return np.concatenate([_draw_line(axes, line, width, reduced) for line, width in drawn])


def _draw_line(axes: Any, line: dict[str, Any], width: int, reduced: dict[str, Any]) -> Values:
    steps, columns, metric = np.array(reduced["last"]), reduced["columns"], line["metric"]
    values = _values(columns, metric)
    known, code = np.isfinite(values), CODES[line["colour"]]
    label = textwrap.fill(line["label"], MAX_LABEL)
    style = {"color": code, "linewidth": 0.5 + 0.7 * width, "markersize": 3}
    axes.plot(steps[known], values[known], ".-", label=label, **style)
    _draw_band(axes, steps, columns[metric], code)
    return values


def _draw_band(axes: Any, steps: NDArray[Any], column: dict[str, Any], code: str) -> None:
    """Shade between the lowest and the highest step of each point, if it has several."""
    if "low" in column:
        low, high = (np.array(column[name], np.float64) for name in ("low", "high"))
        known = np.isfinite(low)
        axes.fill_between(steps[known], low[known], high[known], color=code, alpha=0.2, linewidth=0)


def _values(columns: dict[str, Any], metric: str) -> Values:
    """Return the points of a metric, NaN where it has none, or what the phases of a step leave."""
    if metric == OTHER_TIME:
        phases = [name for name in columns if PANEL_OF_METRIC.get(name) == PANEL_OF_METRIC[metric]]
        known = sum(np.nan_to_num(_values(columns, name)) for name in phases)
        return np.clip(_values(columns, STEP_TIME) - known, 0, None)
    return np.array(columns[metric]["mean"], np.float64)


def _set_scale(axes: Any, chart: Chart, values: Values) -> None:
    """Begin the scale at 0 if the chart does, and say of a few outliers how far beyond it they go.

    Positive values that span many decades have a logarithmic scale.
    """
    values = values[np.isfinite(values)]
    usual, most = np.percentile(values, 95, method="lower"), values.max()
    if not chart["stacked"] and values.min() > 0 and most >= 10**DECADES * values.min():
        axes.set_yscale("log")
        return
    if chart["from_zero"] and values.min() >= 0:
        axes.set_ylim(0, 1.1 * (axes.dataLim.y1 or 1))
    if not chart["whole"] and 0 < 2 * usual < most:
        axes.set_ylim(top=1.1 * usual)
        slowest = f"{most:,.0f}" if most >= 100 else f"{most:.3g}"
        axes.set_title(f"▲ up to {slowest} {chart['unit']}".rstrip(), loc="right", fontsize=8)
