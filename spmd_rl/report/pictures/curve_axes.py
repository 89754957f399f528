"""Drawing helpers of `curves.png`: styled matplotlib axes, lines, scales and legends."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spmd_rl.report.panels import colour_of

Rows = Sequence[dict[str, Any]]

INK, GRID = "#22303c", "#e3e8ec"
HEADROOM = 1.1  # the top of a scale, relative to the highest value
TITLE_PAD = 20  # points between title and frame, where a legend of one row goes
LINE_HEIGHT = 11  # points of each further row of a legend
LEGEND_POINTS, HANDLE_POINTS, LETTER_POINTS = 265, 20, 4.7  # widths: of all names, and of one
MAX_LABEL = 50  # characters of a name in one line


def colour_code(metric: str) -> str:
    """Return the metric's colour for matplotlib."""
    return colour_of(metric).code


def column(rows: Rows, name: str) -> NDArray[np.float64]:
    """Return a metric of all rows, NaN where a row has none."""
    values = [row.get(name) for row in rows]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def style_axes(axes: Any, steps: NDArray[Any]) -> None:
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)
    axes.set_xlim(steps[0], max(steps[-1], steps[0] + 1))
    axes.set_xlabel("step", fontsize=8, color=INK)
    axes.locator_params(axis="x", integer=True)


def set_title(axes: Any, text: str, pad: int = TITLE_PAD) -> None:
    axes.set_title(text, fontsize=10, fontweight="bold", color=INK, loc="left", pad=pad)


def set_note(axes: Any, text: str, pad: int = TITLE_PAD) -> None:
    """Put a few words at the right end of the title's line."""
    axes.set_title(text, fontsize=8, color=INK, loc="right", pad=pad)


def start_at_zero(axes: Any) -> None:
    """Let the scale start at zero and end above the highest value."""
    axes.set_ylim(0, HEADROOM * max(axes.dataLim.y1, 0) or 1)


def add_right_axis(axes: Any, steps: NDArray[Any], rows: Rows, metric: str, label: str) -> Any:
    """Plot a metric on a scale of its own at the right, which is hidden if it has no value."""
    values, colour = column(rows, metric), colour_code(metric)
    right = axes.twinx()
    for spine in right.spines.values():
        spine.set_visible(False)
    right.tick_params(colors=INK, labelsize=8, length=0, pad=7)
    right.yaxis.set_visible(bool(np.isfinite(values).any()))
    right.set_ylabel(label, color=colour, fontsize=8)
    plot_line(right, steps, values, colour, label)
    start_at_zero(right)
    return right


def plot_line(
    axes: Any,
    steps: NDArray[Any],
    values: NDArray[np.float64],
    colour: str,
    label: str,
    **style: Any,
) -> None:
    num_known = np.isfinite(values).sum()
    if not num_known:
        return
    axes.plot(
        steps,
        values,
        color=colour,
        label=label,
        clip_on=False,  # or the frame would cut lines on it
        marker="o" if num_known == 1 else "",  # a single value makes no line
        markersize=4,
        **{"linewidth": 1.4} | style,
    )


def plot_smoothed(
    axes: Any, steps: NDArray[Any], values: NDArray[np.float64], colour: str, label: str
) -> None:
    """Plot every step pale and the running mean in full colour, once there are enough steps."""
    window = len(values) // 20
    if window < 2:
        plot_line(axes, steps, values, colour, label)
        return
    axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.35)
    plot_line(axes, steps, running_mean(values, window), colour, label)


def running_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Return the mean of each value and up to `window - 1` before it, without missing ones."""
    known = np.isfinite(values)
    sums = np.cumsum(np.where(known, values, 0.0))
    counts = np.cumsum(known)
    sums[window:] -= sums[:-window].copy()
    counts[window:] -= counts[:-window].copy()
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def add_legend(*all_axes: Any) -> None:
    """Put the legend between title and frame, where it hides no line, in as few rows as it takes.

    Titles move up to make room for the rows.
    """
    named = [
        pair for axes in all_axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)
    ]
    if not named:
        return
    axes = all_axes[0]
    handles = [handle for handle, _ in named]
    labels = [textwrap.fill(label, MAX_LABEL) for _, label in named]
    ncols = _legend_columns(labels)
    rows = [labels[i :: -(-len(labels) // ncols)] for i in range(-(-len(labels) // ncols))]
    num_lines = sum(max(label.count("\n") + 1 for label in row) for row in rows)
    pad = TITLE_PAD + LINE_HEIGHT * (num_lines - 1)
    set_title(axes, axes.get_title("left"), pad)
    set_note(axes, axes.get_title("right"), pad)
    axes.legend(
        handles,
        labels,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=ncols,
        fontsize=8,
        frameon=False,
        labelcolor=INK,
        borderpad=0,
        borderaxespad=0.4,
        labelspacing=0.2,
        handlelength=1.2,
        handletextpad=0.4,
        columnspacing=1.0,
    )


def _legend_columns(labels: Sequence[str]) -> int:
    """Return the most columns in which the names are no wider than a panel."""
    for ncols in range(len(labels), 1, -1):
        num_rows = -(-len(labels) // ncols)
        columns = [labels[i : i + num_rows] for i in range(0, len(labels), num_rows)]
        widest = [max(map(_width, column)) for column in columns]
        if sum(widest) <= LEGEND_POINTS:
            return ncols
    return 1


def _width(label: str) -> float:
    """Return the points that a name with its handle takes, at the most."""
    return HANDLE_POINTS + LETTER_POINTS * max(map(len, label.split("\n")))
