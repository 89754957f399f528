"""Evaluation of a trainer's weights on held-out answers, pairs or documents, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from spmd_rl.controller.controller import Controller
from spmd_rl.controller.endpoint import Role
from spmd_rl.evaluation.held_out_scores import Measured
from spmd_rl.evaluation.schedule import EvalSchedule, EvalSettings
from spmd_rl.evaluation.scores import metrics_of_sets
from spmd_rl.types.batch import Batch

SEQUENCES_PER_CALL = 1024  # what a role is given at once

R = TypeVar("R")


class HeldOutEvaluation:
    """Evaluates the weights that a trainer has, and records the scores of each set.

    `settings` are those of the recipe, which begins after `first` steps and ends after `num_steps`.
    `measure` asks `roles` about a batch, and `score` makes scores of what it found in all batches
    of a set. Neither changes a weight, so training goes on as if there were no evaluation.
    """

    def __init__(
        self,
        ctl: Controller,
        settings: EvalSettings,
        roles: Sequence[Role],
        sets: Mapping[str, Sequence[Batch]],
        measure: Callable[[Batch], Measured],
        score: Callable[[Measured], dict[str, float]],
        *,
        num_steps: int,
        first: int = 0,
    ) -> None:
        self._ctl = ctl
        self._roles = roles
        self._sets = sets
        self._measure = measure
        self._score = score
        self._schedule = EvalSchedule(settings, ctl.run_folder, num_steps, first)
        ctl.plan_evaluations(self._schedule, [*sets])

    def after(self, num_steps: int) -> None:
        """Evaluate if that is due after `num_steps` train steps. Call it before the next of them.

        Blocks: until all sets are measured.
        """
        if self._sets and self._schedule.is_due(num_steps):
            self._run(num_steps)

    def at_end(self) -> None:
        """Evaluate the last weights, if that is due. Call it after the loop."""
        num_steps = min(self._schedule.num_steps, self._ctl.num_done)
        if self._sets and self._schedule.is_due_at_end(num_steps):
            self._run(num_steps)

    def _run(self, num_steps: int) -> None:
        found = {}
        for name, batches in self._sets.items():
            with self._ctl.phase("eval", awake=self._roles):
                measured = [self._measure(batch) for batch in batches]
            found[name] = self._score(_joined(measured))
        self._ctl.record_evaluation(num_steps, metrics_of_sets(found), {})


def batches_of(
    records: Sequence[R], pack: Callable[[Sequence[R]], Batch], sequences_of_record: int = 1
) -> list[Batch]:
    """Return the records of a set as batches of at most `SEQUENCES_PER_CALL` sequences."""
    size = SEQUENCES_PER_CALL // sequences_of_record
    return [pack(records[first : first + size]) for first in range(0, len(records), size)]


def _joined(measured: Sequence[Measured]) -> dict[str, NDArray[np.float64]]:
    return {name: np.concatenate([one[name] for one in measured]) for name in measured[0]}
