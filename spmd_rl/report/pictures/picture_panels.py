"""Panels of `curves.png`, and which of them a run has something to show on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmd_rl.observe.metrics import METRIC_OF_NAME
from spmd_rl.report.panels import LEVEL, ROUNDING
from spmd_rl.report.pictures.colours import LINES, PHASES
from spmd_rl.report.pictures.curve_axes import (
    HEADROOM,
    Rows,
    add_legend,
    add_right_axis,
    colour_code,
    column,
    plot_line,
    plot_smoothed,
    set_note,
    set_title,
    start_at_zero,
)
from spmd_rl.report.verdicts.main_scores import main_score

MISMATCHED = "onpolicy/mismatched_tokens"  # any of them is worth a panel
MAX_LINES = 4  # of evaluation sets, and of reward parts, in one panel
Draw = Callable[[Any, NDArray[Any], Rows], None]


class PicturePanel(NamedTuple):
    """A panel, and the metrics it draws, of which it needs one that is not flat."""

    draw: Draw
    metrics: Sequence[str]
    always: bool = False  # whether a flat line is worth a panel too


def panels_of(rows: Rows, evaluated: Rows) -> list[Draw]:
    """Return the panels of the steps `rows` and the rows that were `evaluated`.

    A panel whose lines are all flat is left out, unless no other is left.
    """
    panels = [panel for panel in _PANELS if any(_known(rows, name).size for name in panel.metrics)]
    if parts := _part_names(rows):
        panels.append(PicturePanel(_parts, parts))
    shown = [panel for panel in panels if panel.always or not _is_flat(rows, panel.metrics)]
    drawn = [panel.draw for panel in shown or panels]
    if evaluated and rows:
        drawn.insert(min(1, len(drawn)), partial(_evaluations, evaluated))
    return drawn


def mismatch_text(rows: Rows) -> str:
    """Return how many tokens differed; "" where the trainer is compared with no engine."""
    compared = column(rows, "onpolicy/compared_tokens")
    total, num_compared = np.nansum(_mismatches(rows)), np.nansum(compared)
    if not np.isfinite(column(rows, MISMATCHED)).any():
        return ""
    if num_compared:
        return f"{total:,.0f} of {num_compared:,.0f} tokens mismatched"
    return f"{total:,.0f} tokens mismatched" if total else "no tokens compared"


def _known(rows: Rows, name: str) -> NDArray[np.float64]:
    values = column(rows, name)
    known: NDArray[np.float64] = values[np.isfinite(values)]
    return known


def _is_flat(rows: Rows, names: Sequence[str]) -> bool:
    """Whether no line of these metrics would be seen to move. One step alone is not flat."""
    columns = {name: values for name in names if (values := _known(rows, name)).size}
    return all(
        values.size > 1
        and (name != MISMATCHED or not values.any())
        and np.ptp(values) <= max(LEVEL * np.abs(values).max(), _LEAST_CHANGE.get(name, ROUNDING))
        for name, values in columns.items()
    )


def _reward(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    mean = column(rows, "reward/mean")
    set_title(axes, "reward")
    plot_smoothed(axes, steps, mean, colour_code("reward/mean"), "mean")
    known = mean[np.isfinite(mean)]
    if known.size and known.min() >= 0 and known.max() <= 1:  # else shares have another scale
        for name, label in (("reward/solve_all", "all ≥ 1"), ("reward/solve_none", "none > 0")):
            plot_line(axes, steps, column(rows, name), colour_code(name), label, linestyle="--")
        axes.set_ylim(-0.03, 1.03)
    add_legend(axes)


def _evaluations(evaluated: Rows, axes: Any, _: NDArray[Any], __: Rows) -> None:
    """Draw the main score of each evaluation set, from before the first step on."""
    score = main_score(evaluated[-1])
    names = [name for name in evaluated[-1] if re.fullmatch(f"eval/.+/{score}", name)]
    steps = np.array([row["step"] for row in evaluated])
    axes.set_xlim(min(steps[0], axes.get_xlim()[0]))
    label_of = {name: name.removeprefix("eval/").removesuffix(f"/{score}") for name in names}
    what = f"{score.replace('_', ' ')} in evaluation"
    _plot_together(axes, steps, evaluated, label_of, what, "sets")


def _length(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    set_title(axes, "response length")
    mean = "rollout/response_tokens_mean"
    axes.set_ylabel("tokens", color=colour_code(mean), fontsize=8)
    plot_smoothed(axes, steps, column(rows, mean), colour_code(mean), "mean")
    start_at_zero(axes)
    right = add_right_axis(axes, steps, rows, "rollout/truncated", "share truncated")
    right.set_ylim(0, 1)
    add_legend(axes, right)


def _pairs(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    set_title(axes, "pairs ranked as labelled")
    for name, label in (("dpo/accuracy", "in training"), ("reward_model/accuracy", "in training")):
        plot_smoothed(axes, steps, column(rows, name), colour_code(name), label)
    axes.set_ylim(-0.03, 1.03)
    add_legend(axes)


def _pair_rewards(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    set_title(axes, "rewards of pairs")
    for name, label in _PAIR_REWARDS.items():
        plot_smoothed(axes, steps, column(rows, name), colour_code(name), label)
    add_legend(axes)


def _mismatch(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    """Draw the number of mismatched tokens, and on the right how far their log-probs differ."""
    tokens, colour = _mismatches(rows), colour_code(MISMATCHED)
    set_title(axes, "mismatched tokens")
    plot_line(axes, steps, tokens, colour, "trainer vs engine")
    axes.set_ylabel("tokens a step", color=colour, fontsize=8)
    axes.fill_between(steps, 0, tokens, color=colour, alpha=0.15, linewidth=0)
    start_at_zero(axes)
    right = add_right_axis(axes, steps, rows, "onpolicy/max_abs_dlogp", "max |Δ log-prob|")
    add_legend(axes, right)


def _mismatches(rows: Rows) -> NDArray[Any]:
    """Return the mismatched tokens of the steps that compared any."""
    compared = column(rows, "onpolicy/compared_tokens")
    return np.where(compared == 0, np.nan, column(rows, MISMATCHED))


def _kl(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    set_title(axes, "KL divergence")
    axes.set_ylabel("nats per token", color=colour_code("train/kl"), fontsize=8)
    plot_smoothed(axes, steps, column(rows, "train/kl"), colour_code("train/kl"), "from reference")
    add_legend(axes)


def _loss(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    """Draw loss and entropy; a loss that is 0 but for rounding is no line."""
    loss, entropy = column(rows, "train/loss"), column(rows, "train/entropy")
    if np.nanmax(np.abs(loss), initial=0.0) < ROUNDING and np.isfinite(entropy).any():
        set_title(axes, "entropy")
        plot_smoothed(axes, steps, entropy, colour_code("train/entropy"), "nats per token")
        start_at_zero(axes)
        add_legend(axes)
        return
    set_title(axes, "loss and entropy" if np.isfinite(entropy).any() else "loss")
    axes.set_ylabel("loss", color=colour_code("train/loss"), fontsize=8)
    plot_smoothed(axes, steps, loss, colour_code("train/loss"), "loss")
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
        set_note(axes, f"▲ up to {slowest} s")


def _throughput(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    set_title(axes, "tokens per second")
    for name, label in (("rollout/tokens_per_s", "rollout"), ("perf/train_tokens_per_s", "train")):
        plot_line(axes, steps, column(rows, name), colour_code(name), label)
    start_at_zero(axes)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    add_legend(axes)


def _parts(axes: Any, steps: NDArray[Any], rows: Rows) -> None:
    label_of = {name: name.partition("/")[2] for name in _part_names(rows)}
    _plot_together(axes, steps, rows, label_of, "reward parts", "parts")


def _plot_together(
    axes: Any, steps: NDArray[Any], rows: Rows, label_of: dict[str, str], what: str, whole: str
) -> None:
    """Plot metrics that may lie on each other: equal ones are one line, which has all their names.

    Of others, a later line is thinner and dashed, so that an earlier one is seen behind it.
    """
    lines: list[tuple[NDArray[Any], list[str]]] = []
    for name, label in label_of.items():
        values = column(rows, name)
        equal = [names for known, names in lines if np.array_equal(known, values, equal_nan=True)]
        if equal:
            equal[0].append(label)
        else:
            lines.append((values, [label]))
    shown = lines[:MAX_LINES]
    count = sum(len(labels) for _, labels in shown)
    is_all = count == len(label_of)
    set_title(axes, what if is_all else f"{what}: {count} of {len(label_of)} {whole}")
    for place, (values, labels) in enumerate(shown):
        width = _WIDTHS[place] if len(shown) > 1 else 1.4
        style = {"linewidth": width, "linestyle": "-" if place == 0 else (0, _DASHES)}
        plot_line(axes, steps, values, LINES[place].code, " = ".join(labels), **style)
    add_legend(axes)


def _part_names(rows: Rows) -> list[str]:
    """Return the metrics of reward parts: what a reward function returned beside the reward."""
    return sorted(
        {name for row in rows for name in row if name.startswith("reward/")} - METRIC_OF_NAME.keys()
    )


_LEAST_CHANGE = {"rollout/truncated": 2 * LEVEL}  # its axis is always from 0 to 1
_WIDTHS = (3.2, 2.0, 1.4, 0.9)  # points, of lines that may lie on each other
_DASHES = (4, 2)
_PAIR_REWARDS = {
    "dpo/margin": "margin",
    "dpo/chosen_reward": "chosen",
    "dpo/rejected_reward": "rejected",
    "reward_model/margin": "margin",
    "reward_model/chosen": "chosen",
    "reward_model/rejected": "rejected",
}
_PANELS = (
    PicturePanel(_reward, ("reward/mean",), always=True),
    PicturePanel(_pairs, ("dpo/accuracy", "reward_model/accuracy"), always=True),
    PicturePanel(_pair_rewards, tuple(_PAIR_REWARDS)),
    PicturePanel(_length, ("rollout/response_tokens_mean", "rollout/truncated")),
    PicturePanel(_mismatch, (MISMATCHED,)),
    PicturePanel(_loss, ("train/loss", "train/entropy")),
    PicturePanel(_kl, ("train/kl",)),
    PicturePanel(_time, ("time/step",), always=True),
    PicturePanel(_throughput, ("rollout/tokens_per_s", "perf/train_tokens_per_s")),
)
