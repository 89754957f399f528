"""`curves.png`: the panels of a run's curves, drawn from its metrics.

    reward            response length      mismatched tokens
    loss, entropy     seconds a step       tokens per second

A panel without any value is left out. The parts of a reward, if it has any, get one more panel,
and so do evaluations.

    python -m spmd_rl.report.curves metrics.jsonl curves.png TITLE
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from functools import partial
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
from spmd_rl.report.main_scores import main_score

LEGEND_WIDTH = 40  # characters of all names of reward parts together


def draw(rows: Rows, path: Path, title: str) -> None:
    """Write the picture atomically, if the rows have any value."""
    figure = picture(rows, title)
    if figure is None:
        return
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=110)


def picture(rows: Rows, title: str) -> Any:
    """Return the matplotlib figure of the steps from 1, or None if there is nothing to draw."""
    evaluated = [row for row in rows if row["step"] >= 0 and main_score(row)]
    rows = [row for row in rows if row["step"] > 0]
    panels = _panels_with_values(rows)
    if evaluated and rows:
        panels.insert(1, partial(_evaluations, evaluated))
    if not panels:
        return None
    down = math.ceil(len(panels) / 3)
    across = math.ceil(len(panels) / down)
    figure = _empty_figure(down, across, title)
    steps = np.array([row["step"] for row in rows])
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(down, across, number)
        style_axes(axes, steps)
        panel(axes, steps, rows)
    return figure


def _panels_with_values(rows: Rows) -> list[Panel]:
    """Return the panels for which the rows have at least one finite value."""
    panels = [
        panel
        for panel, names in _PANELS
        if any(np.isfinite(column(rows, name)).any() for name in names)
    ]
    return panels + ([_parts] if _part_names(rows) else [])


def _empty_figure(down: int, across: int, title: str) -> Any:
    """Return a figure without panels, large enough for `down` rows of `across` panels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(4.4 * across, 0.3 + 3.2 * down), layout="constrained", facecolor="white"
    )
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK)
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


def _evaluations(evaluated: Rows, axes: Any, _: NDArray[Any], __: Rows) -> None:
    """Draw the main score of each evaluation set, from before the first step on."""
    score = main_score(evaluated[-1])
    names = [name for name in evaluated[-1] if re.fullmatch(f"eval/.+/{score}", name)]
    shown = names[: len(PARTS)]
    count = f": {len(shown)} of {len(names)} sets" if len(shown) < len(names) else ""
    set_title(axes, f"{score.replace('_', ' ')} in evaluation{count}")
    steps = np.array([row["step"] for row in evaluated])
    axes.set_xlim(min(steps[0], axes.get_xlim()[0]))
    for name, colour in zip(shown, PARTS, strict=False):
        label = name.removeprefix("eval/").removesuffix(f"/{score}")[:LEGEND_WIDTH]
        plot_line(axes, steps, column(evaluated, name), colour.code, label)
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
    set_title(axes, f"mismatched tokens: {_mismatch_count(total, num_compared)}")
    if total:
        _draw_mismatches(axes, steps, tokens, rows)
    else:
        plot_line(axes, steps, tokens, GREEN.code, "trainer vs engine")
        axes.set_ylim(-0.05, 1)
        axes.set_yticks([0, 1] if num_compared else [])
        add_legend(axes)


def _draw_mismatches(axes: Any, steps: NDArray[Any], tokens: NDArray[Any], rows: Rows) -> None:
    """Draw the number of mismatched tokens, and on the right how far their log-probs differ."""
    colour = colour_code("onpolicy/mismatched_tokens")
    plot_line(axes, steps, tokens, colour, "trainer vs engine")
    axes.set_ylabel("tokens a step", color=colour, fontsize=8)
    axes.fill_between(steps, 0, tokens, color=colour, alpha=0.15, linewidth=0)
    start_at_zero(axes)
    right = add_right_axis(axes, steps, rows, "onpolicy/max_abs_dlogp", "max |Δ log-prob|")
    add_legend(axes, right)


def _mismatch_count(total: float, num_compared: float) -> str:
    if num_compared:
        return f"{total:,.0f} of {num_compared:,.0f}"
    return f"{total:,.0f}" if total else "no tokens compared"


def _loss(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    set_title(axes, "loss and entropy")
    axes.set_ylabel("loss", color=colour_code("train/loss"), fontsize=8)
    plot_smoothed(axes, steps, column(rows, "train/loss"), colour_code("train/loss"), "loss")
    add_legend(axes, add_right_axis(axes, steps, rows, "train/entropy", "entropy (nats)"))


def _time(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    set_title(axes, "seconds a step")
    whole = column(rows, "time/step")
    shown = _times_of_phases(rows, whole)
    colours = [PHASES[name].code for name in shown]
    axes.stackplot(steps, *shown.values(), labels=[*shown], colors=colours, alpha=0.85)
    start_at_zero(axes)
    _cut_slowest_steps(axes, whole[np.isfinite(whole)])
    add_legend(axes)


def _times_of_phases(rows: Rows, whole: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return the seconds of each phase that has any, and of the rest of the step as `other`."""
    phases = {name: np.nan_to_num(column(rows, f"time/{name}")) for name in PHASES}
    phases["other"] = np.clip(np.nan_to_num(whole) - sum(phases.values()), 0, None)
    return {name: values for name, values in phases.items() if values.any() or name == "other"}


def _cut_slowest_steps(axes: Any, seconds: NDArray[Any]) -> None:
    """Cut the axis above the usual seconds, so that one slow step does not flatten the others."""
    if not seconds.size:
        return
    usual, most = np.percentile(seconds, 95, method="lower"), seconds.max()
    if 0 < 2 * usual < most:
        axes.set_ylim(0, HEADROOM * usual)
        slowest = f"{most:,.0f}" if most >= 100 else f"{most:.3g}"
        axes.set_title(f"▲ up to {slowest} s", fontsize=8, color=INK, loc="right", pad=TITLE_PAD)


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
    width = LEGEND_WIDTH // max(1, len(shown))
    for name, colour in zip(shown, PARTS, strict=False):
        label = name.partition("/")[2][:width]
        plot_smoothed(axes, steps, column(rows, name), colour.code, label)
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
