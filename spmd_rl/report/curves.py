"""`curves.png`: a run at a glance, drawn from its metrics.

    reward            response length      mismatched tokens
    loss, entropy     seconds a step       tokens per second

A panel that the run has no number for is left out; a reward that returns other values too has one
more, for them.

Drawing happens in a process of its own, the last in line for a core, so that no step waits for a
plot:

    python -m spmd_rl.report.curves metrics.jsonl curves.png TITLE
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spmd_rl.observe.atomic_write import atomic_file
from spmd_rl.observe.metrics import METRIC_OF_NAME
from spmd_rl.observe.metrics_log import read_metrics
from spmd_rl.report.colours import GREEN, PARTS, PHASES, colour_of

Rows = Sequence[dict[str, Any]]

LAST_IN_LINE = 19  # niceness

_INK, _GRID = "#22303c", "#e3e8ec"
_PART_CHARACTERS = 10  # of a name, so that four have room
_HEADROOM = 1.1  # of a scale over the highest value on it
_TITLE_PAD = 20  # points between a title and the frame: room for a legend


class CurvePainter:
    """Draws in the background, the newest state only: a request during a drawing waits for nothing
    and is dropped.
    """

    def __init__(self, metrics: Path, path: Path, title: str) -> None:
        self._metrics = metrics
        self._path = path
        self._title = title
        self._process: subprocess.Popen[bytes] | None = None

    def request(self) -> None:
        """Start a drawing of what is written by now, unless one is under way."""
        if self._process is None or self._process.poll() is not None:
            words = [str(self._metrics), str(self._path), self._title]
            command = [sys.executable, "-m", "spmd_rl.report.curves", *words]
            quiet = subprocess.DEVNULL  # `finish` draws again, and tells what is wrong
            self._process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)
            os.setpriority(os.PRIO_PROCESS, self._process.pid, LAST_IN_LINE)

    def finish(self, rows: Rows) -> None:
        """Blocks: until `rows`, the last state, are drawn, about a second."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        draw(rows, self._path, self._title)


def draw(rows: Rows, path: Path, title: str) -> None:
    """Write the picture at once, whole; without a number there is none."""
    figure = picture(rows, title)
    if figure is None:
        return
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=110)


def picture(rows: Rows, title: str) -> Any:
    """The matplotlib figure of the steps from 1, with at most three panels side by side; None
    without a number.
    """
    rows = [row for row in rows if row["step"] > 0]
    panels = [
        panel
        for panel, names in _PANELS
        if any(np.isfinite(_column(rows, name)).any() for name in names)
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
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", color=_INK)
    steps = np.array([row["step"] for row in rows])
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(down, across, number)
        _dress(axes, steps)
        panel(axes, steps, rows)
    return figure


def _reward(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    mean = _column(rows, "reward/mean")
    _title(axes, "reward")
    _raw_and_smooth(axes, steps, mean, _code("reward/mean"), "mean")
    for name, label in (("reward/solve_all", "all samples ≥ 1"), ("reward/solve_none", "none > 0")):
        _line(axes, steps, _column(rows, name), _code(name), label, linestyle="--")
    finite = mean[np.isfinite(mean)]
    if finite.size and finite.min() >= 0 and finite.max() <= 1:
        axes.set_ylim(-0.03, 1.03)
    _legend(axes)


def _length(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    _title(axes, "response length")
    mean = "rollout/response_tokens_mean"
    axes.set_ylabel("tokens", color=_code(mean), fontsize=8)
    _raw_and_smooth(axes, steps, _column(rows, mean), _code(mean), "mean")
    _from_zero(axes)
    right = _second_axis(axes, steps, rows, "rollout/truncated", "share truncated")
    right.set_ylim(0, 1)
    _legend(axes, right)


def _mismatch(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    tokens, compared = (
        _column(rows, f"onpolicy/{what}_tokens") for what in ("mismatched", "compared")
    )
    tokens = np.where(compared == 0, np.nan, tokens)
    total, of_all = np.nansum(tokens), np.nansum(compared)
    said = (
        f"{total:,.0f} of {of_all:,.0f}"
        if of_all
        else f"{total:,.0f}"
        if total
        else "no tokens compared"
    )
    _title(axes, f"mismatched tokens: {said}")
    colour = _code("onpolicy/mismatched_tokens") if total else GREEN.code
    _line(axes, steps, tokens, colour, "trainer vs engine")
    if total:
        axes.set_ylabel("tokens a step", color=colour, fontsize=8)
        axes.fill_between(steps, 0, tokens, color=colour, alpha=0.15, linewidth=0)
        _from_zero(axes)
        _legend(axes, _second_axis(axes, steps, rows, "onpolicy/max_abs_dlogp", "max |Δ log-prob|"))
    else:
        axes.set_ylim(-0.05, 1)
        axes.set_yticks([0, 1] if of_all else [])
        _legend(axes)


def _loss(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    _title(axes, "loss and entropy")
    axes.set_ylabel("loss", color=_code("train/loss"), fontsize=8)
    _raw_and_smooth(axes, steps, _column(rows, "train/loss"), _code("train/loss"), "loss")
    _legend(axes, _second_axis(axes, steps, rows, "train/entropy", "entropy (nats)"))


def _time(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    _title(axes, "seconds a step")
    phases = {name: np.nan_to_num(_column(rows, f"time/{name}")) for name in PHASES}
    whole = _column(rows, "time/step")
    phases["other"] = np.clip(np.nan_to_num(whole) - sum(phases.values()), 0, None)
    shown = {name: values for name, values in phases.items() if values.any() or name == "other"}
    colours = [PHASES[name].code for name in shown]
    axes.stackplot(steps, *shown.values(), labels=[*shown], colors=colours, alpha=0.85)
    _from_zero(axes)
    known = whole[np.isfinite(whole)]
    if known.size and 0 < 2 * (usual := np.percentile(known, 95, method="lower")) < known.max():
        axes.set_ylim(0, _HEADROOM * usual)  # one slow first step must not flatten the rest
        most = f"{known.max():,.0f}" if known.max() >= 100 else f"{known.max():.3g}"
        axes.set_title(f"▲ up to {most} s", fontsize=8, color=_INK, loc="right", pad=_TITLE_PAD)
    _legend(axes)


def _throughput(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    _title(axes, "tokens per second")
    for name, label in (("rollout/tokens_per_s", "rollout"), ("perf/train_tokens_per_s", "train")):
        _line(axes, steps, _column(rows, name), _code(name), label)
    _from_zero(axes)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _legend(axes)


def _parts(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    names = _part_names(rows)
    shown = names[: len(PARTS)]
    _title(
        axes,
        "beside the reward"
        + (f": {len(shown)} of {len(names)}" if len(shown) < len(names) else ""),
    )
    for name, colour in zip(shown, PARTS, strict=False):
        _raw_and_smooth(
            axes, steps, _column(rows, name), colour.code, name.partition("/")[2][:_PART_CHARACTERS]
        )
    _legend(axes)


def _part_names(rows: Rows) -> list[str]:
    """The metrics that are means of what a reward function returned beside the reward."""
    return sorted(
        {name for row in rows for name in row if name.startswith("reward/")} - METRIC_OF_NAME.keys()
    )


Panel = Callable[[Any, NDArray[Any], Rows], None]

# each with the metrics of which it needs one
_PANELS: tuple[tuple[Panel, tuple[str, ...]], ...] = (
    (_reward, ("reward/mean",)),
    (_length, ("rollout/response_tokens_mean",)),
    (_mismatch, ("onpolicy/mismatched_tokens",)),
    (_loss, ("train/loss", "train/entropy")),
    (_time, ("time/step",)),
    (_throughput, ("rollout/tokens_per_s", "perf/train_tokens_per_s")),
)


def _code(metric: str) -> str:
    return colour_of(metric).code


def _column(rows: Rows, name: str) -> NDArray[np.float64]:
    values = [row.get(name) for row in rows]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _dress(axes: Any, steps: NDArray[Any]) -> None:
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=8, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_GRID)
    axes.set_xlim(steps[0], max(steps[-1], steps[0] + 1))
    axes.set_xlabel("step", fontsize=8, color=_INK)
    axes.locator_params(axis="x", integer=True)


def _title(axes: Any, text: str) -> None:
    axes.set_title(text, fontsize=10, fontweight="bold", color=_INK, loc="left", pad=_TITLE_PAD)


def _from_zero(axes: Any) -> None:
    """Zero at the bottom, and the highest value of the lines clearly below the top."""
    axes.set_ylim(0, _HEADROOM * max(axes.dataLim.y1, 0) or 1)


def _second_axis(axes: Any, steps: NDArray[Any], rows: Rows, metric: str, label: str) -> Any:
    """A metric on a scale of its own, at the right; no scale where it has no value."""
    values, colour = _column(rows, metric), _code(metric)
    right = axes.twinx()
    for spine in right.spines.values():
        spine.set_visible(False)
    right.tick_params(colors=_INK, labelsize=8, length=0, pad=7)
    right.yaxis.set_visible(bool(np.isfinite(values).any()))
    right.set_ylabel(label, color=colour, fontsize=8)
    _line(right, steps, values, colour, label)
    _from_zero(right)
    return right


def _line(
    axes: Any,
    steps: NDArray[Any],
    values: NDArray[np.float64],
    colour: str,
    label: str,
    **style: Any,
) -> None:
    if known := np.isfinite(values).sum():
        marker = "o" if known == 1 else ""  # a line shows nothing of a single value
        whole = {"clip_on": False, "marker": marker, "markersize": 4}  # also on the frame
        axes.plot(steps, values, color=colour, linewidth=1.4, label=label, **whole, **style)


def _raw_and_smooth(
    axes: Any, steps: NDArray[Any], values: NDArray[np.float64], colour: str, label: str
) -> None:
    """Every step pale, their running mean in full colour once there are enough of them."""
    window = len(values) // 20
    if window < 2:
        _line(axes, steps, values, colour, label)
        return
    axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.35)
    _line(axes, steps, running_mean(values, window), colour, label)


def running_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Mean of each value and up to `window - 1` before it, missing ones left out."""
    known = np.isfinite(values)
    sums = np.cumsum(np.where(known, values, 0.0))
    counts = np.cumsum(known)
    sums[window:] -= sums[:-window].copy()
    counts[window:] -= counts[:-window].copy()
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _legend(*all_axes: Any) -> None:
    """Name the lines between title and frame, where they hide none of them."""
    named = [
        pair for axes in all_axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)
    ]
    if named:
        room = {
            "borderpad": 0,
            "borderaxespad": 0.4,
            "handlelength": 1.2,
            "handletextpad": 0.4,
            "columnspacing": 1.0,
        }
        where = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": len(named)}
        all_axes[0].legend(
            *zip(*named, strict=True), fontsize=8, frameon=False, labelcolor=_INK, **where, **room
        )


if __name__ == "__main__":
    draw(read_metrics(Path(sys.argv[1])), Path(sys.argv[2]), sys.argv[3])
