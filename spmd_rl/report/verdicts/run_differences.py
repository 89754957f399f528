"""Which of several runs is ahead in a score, and whether by more than its noise.

Runs of different lengths are compared up to the last step that all of them have.
"""

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
    common = {run: up_to_common_step(rows, rows_of) for run, rows in rows_of.items()}
    found = (*_lengths(rows_of), *_evaluations(common), *_in_training(common))
    return [one._asdict() for one in found]


def up_to_common_step(rows: Sequence[Row], rows_of: Mapping[str, Sequence[Row]]) -> Sequence[Row]:
    """Return the rows of a run up to the last step that all runs have.

    They are all of them where the runs have no step in common.
    """
    common = _common_step(rows_of)
    return rows if common is None else [row for row in rows if row["step"] <= common]


def _common_step(rows_of: Mapping[str, Sequence[Row]]) -> int | None:
    """Return the last step that all runs with training steps have; None where there is none."""
    steps = [[row["step"] for row in training_rows(rows)] for rows in rows_of.values()]
    known = [one for one in steps if one]
    last = min((one[-1] for one in known), default=0)
    return last if last >= max((one[0] for one in known), default=math.inf) else None


def _lengths(rows_of: Mapping[str, Sequence[Row]]) -> Iterator[Finding]:
    """Yield that the runs have different lengths, and where they are compared then."""
    last = {run: rows[-1]["step"] for run, rows in rows_of.items() if training_rows(rows)}
    if len(set(last.values())) < 2:
        return
    listed = ", ".join(f"{run} has {step:,}" for run, step in last.items())
    if (common := _common_step(rows_of)) is None:
        yield Finding("bad", f"The runs have no step in common, and each is taken whole: {listed}")
    else:
        yield Finding("", f"The runs are compared at step {common:,}, the last of all: {listed}")


def _evaluations(rows_of: Mapping[str, Sequence[Row]]) -> Iterator[Finding]:
    metrics = {name for rows in rows_of.values() for row in rows for name in row}
    for name in sorted(metrics):
        if match := SCORE_OF_SET.fullmatch(name):
            found = {
                run: {row["step"]: row for row in rows if is_number(row.get(name))}
                for run, rows in rows_of.items()
            }
            last = _last_common({run: by_step for run, by_step in found.items() if by_step})
            means = {run: evaluation_mean(row, name) for run, row in last.items()}
            steps = " and ".join(str(step) for step in {row["step"]: 0 for row in last.values()})
            what = f"Evaluation {match[1]} at step {steps}: {match[2].replace('_', ' ')}"
            yield from _ahead(what, means, MAIN_SCORES[match[2]])


def _last_common(rows_of: Mapping[str, Mapping[int, Row]]) -> dict[str, Row]:
    """Return each run's row of the last step that all have; else of its own last one."""
    common = set.intersection(*map(set, rows_of.values()))
    return {run: by_step[max(common or by_step)] for run, by_step in rows_of.items()}


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
