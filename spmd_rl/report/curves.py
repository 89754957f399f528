"""`curves.png`: the panels of a run's curves, drawn from its metrics.

    reward            response length      mismatched tokens
    loss, entropy     seconds a step       tokens per second

A panel without any value is left out. The parts of a reward, if it has any, get one more panel.

    python -m spmd_rl.report.curves metrics.jsonl curves.png TITLE
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spmd_rl.observe.atomic_write import atomic_file
from spmd_rl.observe.metrics import METRIC_OF_NAME
from spmd_rl.observe.metrics_log import read_metrics
from spmd_rl.report.colours import GREEN, PARTS, PHASES
from spmd_rl.report.curve_axes import (
    HEADROOM,
    INK,
    TITLE_PAD,
    Rows,
    add_legend,
    add_right_axis,
    colour_code,
    column,
    plot_line,
    plot_smoothed,
    set_title,
    start_at_zero,
    style_axes,
)

MAX_LABEL = 10  # characters of the name of a reward part, so that four fit


def draw(rows: Rows, path: Path, title: str) -> None:
    """Write the picture atomically, if the rows have any value."""
    figure = picture(rows, title)
    if figure is None:
        return
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=110)


def picture(rows: Rows, title: str) -> Any:
    """Return the matplotlib figure of the steps from 1, or None if there is nothing to draw."""
    rows = [row for row in rows if row["step"] > 0]
    panels = [
        panel
        for panel, names in _PANELS
        if any(np.isfinite(column(rows, name)).any() for name in names)
    ]
    panels += [_parts] if _part_names(rows) else []
    if not panels:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    down = math.ceil(len(panels) / 3)
    across = math.ceil(len(panels) / down)
    figure = Figure(
        figsize=(4.4 * across, 0.3 + 3.2 * down), layout="constrained", facecolor="white"
    )
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK)
    steps = np.array([row["step"] for row in rows])
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(down, across, number)
        style_axes(axes, steps)
        panel(axes, steps, rows)
    return figure


def _reward(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    mean = column(rows, "reward/mean")
    set_title(axes, "reward")
    plot_smoothed(axes, steps, mean, colour_code("reward/mean"), "mean")
    for name, label in (("reward/solve_all", "all samples ≥ 1"), ("reward/solve_none", "none > 0")):
        plot_line(axes, steps, column(rows, name), colour_code(name), label, linestyle="--")
    finite = mean[np.isfinite(mean)]
    if finite.size and finite.min() >= 0 and finite.max() <= 1:
        axes.set_ylim(-0.03, 1.03)
    add_legend(axes)


def _length(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    set_title(axes, "response length")
    mean = "rollout/response_tokens_mean"
    axes.set_ylabel("tokens", color=colour_code(mean), fontsize=8)
    plot_smoothed(axes, steps, column(rows, mean), colour_code(mean), "mean")
    start_at_zero(axes)
    right = add_right_axis(axes, steps, rows, "rollout/truncated", "share truncated")
    right.set_ylim(0, 1)
    add_legend(axes, right)


def _mismatch(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    compared = column(rows, "onpolicy/compared_tokens")
    tokens = np.where(compared == 0, np.nan, column(rows, "onpolicy/mismatched_tokens"))
    total, num_compared = np.nansum(tokens), np.nansum(compared)
    text = f"{total:,.0f}" if total else "no tokens compared"
    if num_compared:
        text = f"{total:,.0f} of {num_compared:,.0f}"
    set_title(axes, f"mismatched tokens: {text}")
    colour = colour_code("onpolicy/mismatched_tokens") if total else GREEN.code
    plot_line(axes, steps, tokens, colour, "trainer vs engine")
    if total:
        axes.set_ylabel("tokens a step", color=colour, fontsize=8)
        axes.fill_between(steps, 0, tokens, color=colour, alpha=0.15, linewidth=0)
        start_at_zero(axes)
        add_legend(
            axes, add_right_axis(axes, steps, rows, "onpolicy/max_abs_dlogp", "max |Δ log-prob|")
        )
    else:
        axes.set_ylim(-0.05, 1)
        axes.set_yticks([0, 1] if num_compared else [])
        add_legend(axes)


def _loss(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    set_title(axes, "loss and entropy")
    axes.set_ylabel("loss", color=colour_code("train/loss"), fontsize=8)
    plot_smoothed(axes, steps, column(rows, "train/loss"), colour_code("train/loss"), "loss")
    add_legend(axes, add_right_axis(axes, steps, rows, "train/entropy", "entropy (nats)"))


def _time(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    set_title(axes, "seconds a step")
    phases = {name: np.nan_to_num(column(rows, f"time/{name}")) for name in PHASES}
    whole = column(rows, "time/step")
    phases["other"] = np.clip(np.nan_to_num(whole) - sum(phases.values()), 0, None)
    shown = {name: values for name, values in phases.items() if values.any() or name == "other"}
    colours = [PHASES[name].code for name in shown]
    axes.stackplot(steps, *shown.values(), labels=[*shown], colors=colours, alpha=0.85)
    start_at_zero(axes)
    known = whole[np.isfinite(whole)]
    if known.size and 0 < 2 * (usual := np.percentile(known, 95, method="lower")) < known.max():
        axes.set_ylim(0, HEADROOM * usual)  # one slow first step must not flatten the others
        slowest = f"{known.max():,.0f}" if known.max() >= 100 else f"{known.max():.3g}"
        axes.set_title(f"▲ up to {slowest} s", fontsize=8, color=INK, loc="right", pad=TITLE_PAD)
    add_legend(axes)


def _throughput(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    set_title(axes, "tokens per second")
    for name, label in (("rollout/tokens_per_s", "rollout"), ("perf/train_tokens_per_s", "train")):
        plot_line(axes, steps, column(rows, name), colour_code(name), label)
    start_at_zero(axes)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    add_legend(axes)


def _parts(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    names = _part_names(rows)
    shown = names[: len(PARTS)]
    count = f": {len(shown)} of {len(names)}" if len(shown) < len(names) else ""
    set_title(axes, f"reward parts{count}")
    for name, colour in zip(shown, PARTS, strict=False):
        plot_smoothed(
            axes, steps, column(rows, name), colour.code, name.partition("/")[2][:MAX_LABEL]
        )
    add_legend(axes)


def _part_names(rows: Rows) -> list[str]:
    """Return the metrics of reward parts: what a reward function returned beside the reward."""
    return sorted(
        {name for row in rows for name in row if name.startswith("reward/")} - METRIC_OF_NAME.keys()
    )


Panel = Callable[[Any, NDArray[Any], Rows], None]

# each panel with the metrics it draws, of which it needs at least one
_PANELS: tuple[tuple[Panel, tuple[str, ...]], ...] = (
    (_reward, ("reward/mean",)),
    (_length, ("rollout/response_tokens_mean",)),
    (_mismatch, ("onpolicy/mismatched_tokens",)),
    (_loss, ("train/loss", "train/entropy")),
    (_time, ("time/step",)),
    (_throughput, ("rollout/tokens_per_s", "perf/train_tokens_per_s")),
)


if __name__ == "__main__":
    draw(read_metrics(Path(sys.argv[1])), Path(sys.argv[2]), sys.argv[3])
