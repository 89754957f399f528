"""What changed in a run: evaluations and rewards, first against last, and what asks for a look."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from statistics import fmean, variance
from typing import Any, NamedTuple

from spmd_rl.observe.metrics import METRIC_OF_NAME
from spmd_rl.report.main_scores import MAIN_SCORES
from spmd_rl.report.time_axes import is_number, training_rows

Row = dict[str, Any]

MIN_STANDARD_ERRORS = 2.0  # by which two means must differ to count as a change
MIN_STEPS = 10  # from which the first steps are compared with the last
MANY_TRUNCATED = 0.1  # share of responses from which it is a warning
LONGER = 2.0  # factor in length that is a warning
_SCORE_OF_SET = re.compile(rf"eval/(.+)/({'|'.join(MAIN_SCORES)})")
_REJECTED = "rollout/rejected_"


class Mean(NamedTuple):
    """A mean and its standard error, NaN where it is not known."""

    value: float
    error: float


def what_changed(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return sentences, each with its mood: "good", "bad", or "" for neither."""
    steps = training_rows(rows)
    sentences = [
        *_evaluations(rows),
        *_rewards(steps),
        *_lengths(steps),
        *_left_out(steps),
    ]
    return [{"mood": mood, "text": text} for mood, text in sentences]


def _evaluations(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    names = {
        name: match for row in rows for name in row if (match := _SCORE_OF_SET.fullmatch(name))
    }
    for name, match in names.items():
        found = [row for row in rows if is_number(row.get(name))]
        if len(found) < 2:
            continue
        first, last = (Mean(row[name], _number(row, f"{name}_error")) for row in _ends(found))
        steps, score = f"from step {found[0]['step']} to {found[-1]['step']}", match[2]
        what = f"Evaluation {match[1]}, {steps}: {score.replace('_', ' ')}"
        yield _compared(what, first, last, MAIN_SCORES[score])


def _rewards(steps: Sequence[Row]) -> Iterator[tuple[str, str]]:
    parts = {name for row in steps for name in row if name.startswith("reward/")}
    for name in ["reward/mean", *sorted(parts - METRIC_OF_NAME.keys())]:
        if means := _first_and_last(steps, name):
            is_part = name != "reward/mean"
            what = f"Reward part {name.partition('/')[2]}:" if is_part else "Reward in training:"
            mood, text = _compared(what, *means)
            yield ("" if is_part else mood), text


def _lengths(steps: Sequence[Row]) -> Iterator[tuple[str, str]]:
    if truncated := _first_and_last(steps, "rollout/truncated"):
        first, last = (mean.value for mean in truncated)
        if last >= MANY_TRUNCATED:
            yield (
                "bad",
                (
                    f"{last:.0%} of the last responses were cut at sampling.max_tokens, "
                    f"{first:.0%} of the first"
                ),
            )
    if lengths := _first_and_last(steps, "rollout/response_tokens_mean"):
        first, last = (mean.value for mean in lengths)
        if last >= LONGER * first or first >= LONGER * last > 0:
            yield "bad", f"Responses went from {first:.4g} to {last:.4g} tokens"


def _left_out(steps: Sequence[Row]) -> Iterator[tuple[str, str]]:
    names = sorted({name for row in steps for name in row if name.startswith(_REJECTED)})
    counts = {name.removeprefix(_REJECTED): _total(steps, name) for name in names}
    if named := [f"{count:,.0f} {reason}" for reason, count in counts.items() if count]:
        yield "", f"Rejected groups by reason: {', '.join(named)}"
    if failed := _total(steps, "reward/failed_samples"):
        yield "bad", f"{failed:,.0f} samples failed, and nothing was learned from them"


def _compared(what: str, first: Mean, last: Mean, better: int = 1) -> tuple[str, str]:
    """Return the mood and the sentence of two means; with `better` -1 less is better."""
    change, error = last.value - first.value, math.hypot(first.error, last.error)
    both = f"{what} {_text(first)} → {_text(last)}"
    if math.isnan(error):
        return "", f"{both}; the noise is not known"
    if abs(change) <= MIN_STANDARD_ERRORS * error or not change:
        return "", f"{both}: no change beyond {MIN_STANDARD_ERRORS:g} standard errors"
    mood = "good" if change * better > 0 else "bad"
    return mood, f"{both}: it {'rose' if change > 0 else 'fell'}"


def _first_and_last(steps: Sequence[Row], name: str) -> tuple[Mean, Mean] | None:
    """Return the means of the first and the last fifth of the steps; None of too few steps."""
    values = [float(row[name]) for row in steps if is_number(row.get(name))]
    if len(values) < MIN_STEPS:
        return None
    part = len(values) // 5
    return _mean(values[:part]), _mean(values[-part:])


def _mean(values: Sequence[float]) -> Mean:
    return Mean(fmean(values), math.sqrt(variance(values) / len(values)))


def _text(mean: Mean) -> str:
    error = "" if math.isnan(mean.error) else f" ± {mean.error:.2g}"
    return f"{mean.value:.3g}{error}"


def _ends(rows: Sequence[Row]) -> tuple[Row, Row]:
    return rows[0], rows[-1]


def _number(row: Row, name: str) -> float:
    return float(row[name]) if is_number(row.get(name)) else math.nan


def _total(steps: Sequence[Row], name: str) -> float:
    return sum(row[name] for row in steps if is_number(row.get(name)))
