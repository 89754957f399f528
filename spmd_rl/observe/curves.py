"""`curves.png`: a run at a glance, drawn from its metrics.

    reward            response length      mismatched tokens
    loss, entropy     seconds a step       tokens per second

Drawing happens in a process of its own, the last in line for a core, so that no step waits for a plot:

    python -m spmd_rl.observe.curves metrics.jsonl curves.png TITLE
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spmd_rl.observe.metrics import read_metrics

Rows = Sequence[dict[str, Any]]

LAST_IN_LINE = 19  # niceness

PHASES = ("rollout", "train", "sync", "sleep", "wake")
_INK, _GRID = "#22303c", "#e3e8ec"
_BLUE, _RED, _GREEN, _AMBER, _VIOLET, _GREY = "#2667c9", "#d1495b", "#2a9d6f", "#e08e2b", "#7a5cc2", "#a7b1ba"
_PHASE_COLOURS = (_BLUE, _AMBER, _GREEN, _VIOLET, _RED)


class CurvePainter:
    """Draws in the background, the newest state only: a request during a drawing waits for nothing and is dropped."""

    def __init__(self, metrics: Path, path: Path, title: str) -> None:
        self._metrics = metrics
        self._path = path
        self._title = title
        self._process: subprocess.Popen[bytes] | None = None

    def request(self) -> None:
        """Start a drawing of what is written by now, unless one is under way."""
        if self._process is None or self._process.poll() is not None:
            words = [str(self._metrics), str(self._path), self._title]
            command = [sys.executable, "-m", "spmd_rl.observe.curves", *words]
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
    """Write the picture at once, whole; without rows there is none."""
    if not rows:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6.6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", color=_INK)
    panels = (_reward, _length, _mismatch, _loss, _time, _throughput)
    steps = np.array([row["step"] for row in rows])
    for axes, panel in zip(figure.subplots(2, 3).flat, panels, strict=True):
        _dress(axes, steps)
        panel(axes, steps, rows)
    part = path.with_name(path.name + ".part")
    figure.savefig(part, format="png", dpi=110)
    os.replace(part, path)


def _reward(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    mean = _column(rows, "reward/mean")
    _title(axes, "reward")
    _raw_and_smooth(axes, steps, mean, _BLUE, "mean")
    _line(axes, steps, _column(rows, "reward/solve_all"), _GREEN, "all samples solve", linestyle="--")
    _line(axes, steps, _column(rows, "reward/solve_none"), _GREY, "none solves", linestyle="--")
    finite = mean[np.isfinite(mean)]
    if finite.size and finite.min() >= 0 and finite.max() <= 1:
        axes.set_ylim(-0.03, 1.03)
    _legend(axes)


def _length(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    _title(axes, "response length")
    axes.set_ylabel("tokens", color=_BLUE, fontsize=8)
    _raw_and_smooth(axes, steps, _column(rows, "rollout/response_tokens_mean"), _BLUE, "mean length")
    axes.set_ylim(bottom=0)
    truncated = _column(rows, "rollout/truncated")
    if np.isfinite(truncated).any():
        right = _second_axis(axes, "share truncated", _AMBER)
        _line(right, steps, truncated, _AMBER, "truncated")
        right.set_ylim(-0.03, 1.03)


def _mismatch(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    tokens = _column(rows, "onpolicy/mismatched_tokens")
    total, compared = np.nansum(tokens), np.nansum(_column(rows, "onpolicy/compared_tokens"))
    _title(axes, f"trainer vs engine: {total:,.0f} of {compared:,.0f} tokens mismatched")
    axes.set_ylabel("tokens a step", color=_RED if total else _GREEN, fontsize=8)
    axes.plot(steps, tokens, color=_RED if total else _GREEN, linewidth=1.6)
    axes.fill_between(steps, 0, tokens, color=_RED, alpha=0.15, linewidth=0)
    if not total:
        axes.set_ylim(-0.05, 1)
        axes.set_yticks([0, 1])
        return
    axes.set_ylim(bottom=0)
    right = _second_axis(axes, "max |Δ log-prob|", _VIOLET)
    _line(right, steps, _column(rows, "onpolicy/max_abs_dlogp"), _VIOLET, "max")
    right.set_ylim(bottom=0)


def _loss(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    _title(axes, "loss and entropy")
    axes.set_ylabel("loss", color=_BLUE, fontsize=8)
    _raw_and_smooth(axes, steps, _column(rows, "train/loss"), _BLUE, "loss")
    right = _second_axis(axes, "entropy (nats)", _AMBER)
    _line(right, steps, _column(rows, "train/entropy"), _AMBER, "entropy")
    right.set_ylim(bottom=0)


def _time(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    _title(axes, "seconds a step")
    phases = {name: np.nan_to_num(_column(rows, f"time/{name}")) for name in PHASES}
    whole = _column(rows, "time/step")
    rest = np.clip(np.nan_to_num(whole) - sum(phases.values()), 0, None)
    shown = {name: values for name, values in phases.items() if values.any()}
    colours = [_PHASE_COLOURS[PHASES.index(name)] for name in shown]
    axes.stackplot(steps, *shown.values(), rest, labels=[*shown, "other"], colors=[*colours, _GREY], alpha=0.85)
    if np.isfinite(whole).any():
        slow = 2 * float(np.nanmedian(whole))  # one slow first step must not flatten the rest
        axes.set_ylim(0, min(slow, 1.05 * float(np.nanmax(whole))))
    _legend(axes)


def _throughput(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    _title(axes, "tokens per second")
    _line(axes, steps, _column(rows, "rollout/tokens_per_s"), _BLUE, "rollout")
    _line(axes, steps, _column(rows, "perf/train_tokens_per_s"), _AMBER, "train")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _legend(axes)


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
    axes.set_title(text, fontsize=10, fontweight="bold", color=_INK, loc="left")


def _second_axis(axes: Any, label: str, colour: str) -> Any:
    right = axes.twinx()
    right.set_ylabel(label, color=colour, fontsize=8)
    right.tick_params(colors=_INK, labelsize=8, length=0)
    for spine in right.spines.values():
        spine.set_visible(False)
    return right


def _line(axes: Any, steps: NDArray[Any], values: NDArray[np.float64], colour: str, label: str, **style: Any) -> None:
    if np.isfinite(values).any():
        axes.plot(steps, values, color=colour, linewidth=1.4, label=label, **style)


def _raw_and_smooth(axes: Any, steps: NDArray[Any], values: NDArray[np.float64], colour: str, label: str) -> None:
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


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, framealpha=0.8, edgecolor="none", labelcolor=_INK, loc="best")


if __name__ == "__main__":
    draw(read_metrics(Path(sys.argv[1])), Path(sys.argv[2]), sys.argv[3])
