"""Which of several runs is ahead in a score, and whether by more than its noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spmd_rl.report.means import MIN_STANDARD_ERRORS, Mean, evaluation_mean, latest_mean
from spmd_rl.report.pictures.time_axes import is_number, training_rows
from spmd_rl.report.verdicts.changes import IN_TRAINING, SCORE_OF_SET
from spmd_rl.report.verdicts.findings import Finding
from spmd_rl.report.verdicts.main_scores import MAIN_SCORES

Row = dict[str, Any]


def run_differences(rows_of: Mapping[str, Sequence[Row]]) -> list[dict[str, str]]:
    """Return a finding on each score that two runs or more have. Keys are the names of the runs."""
    return [one._asdict() for one in (*_evaluations(rows_of), *_in_training(rows_of))]


def _evaluations(rows_of: Mapping[str, Sequence[Row]]) -> Iterator[Finding]:
    metrics = {name for rows in rows_of.values() for row in rows for name in row}
    for name in sorted(metrics):
        if match := SCORE_OF_SET.fullmatch(name):
            last = {run: _last(rows, name) for run, rows in rows_of.items()}
            what = f"Last evaluation {match[1]}: {match[2].replace('_', ' ')}"
            yield from _ahead(what, last, MAIN_SCORES[match[2]])


def _last(rows: Sequence[Row], name: str) -> Mean | None:
    found = [row for row in rows if is_number(row.get(name))]
    return evaluation_mean(found[-1], name) if found else None


def _in_training(rows_of: Mapping[str, Sequence[Row]]) -> Iterator[Finding]:
    for name, (what, better) in IN_TRAINING.items():
        if name == "train/loss":
            continue  # the loss of another algorithm is another quantity
        means = {run: latest_mean(training_rows(rows), name) for run, rows in rows_of.items()}
        yield from _ahead(f"{what}, last fifth of the steps:", means, better)


def _ahead(what: str, means: Mapping[str, Mean | None], better: int) -> Iterator[Finding]:
    """Yield which run is ahead of the next, if there are two."""
    known = [(run, mean) for run, mean in means.items() if mean]
    if len(known) < 2:
        return
    known.sort(key=lambda one: better * one[1].value, reverse=True)
    listed = ", ".join(f"{run} {mean}" for run, mean in known)
    (first, best), (second, following) = known[:2]
    noise = best.noise(following)
    if best.value == following.value:
        yield Finding("flat", f"{what} {listed}: no difference")
    elif math.isnan(noise):
        yield Finding("flat", f"{what} {listed}; the noise is not known")
    elif best.differs(following):
        yield Finding("good", f"{what} {listed}: {first} is ahead of {second} beyond the noise")
    else:
        least = f"no difference beyond {MIN_STANDARD_ERRORS:g} standard errors"
        yield Finding("flat", f"{what} {listed}: {least} between {first} and {second}")
