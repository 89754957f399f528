"""The comparison with TRL's losses: its cases, and that a difference is seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.losses_vs_trl import with_largest
from benchmarks.record import measured
from benchmarks.trl_losses import given
from benchmarks.trl_losses.cases import CASES
from tests.unit.algo.cases import draw_case


class Mirror:
    """In place of TRL: it answers with what our side computes, changed by `change`."""

    def __init__(self, name: str, change: float) -> None:
        self.case = CASES[name]
        self.change = change
        self.request: dict[str, Any] = {}

    def ask(self, **request: Any) -> dict[str, Any]:
        self.request = request
        made = given.algorithm_of(self.case)
        (answers,) = [found for found in given.draws(self.case) if self.is_of(found)]
        batch = given.batch_of(answers, made)
        logprobs = np.concatenate([answer.logprobs for answer in answers])
        loss, gradient = given.loss_and_gradient(made, batch, logprobs)
        return {"loss": loss, "gradient": [(gradient * self.change).tolist()]}

    def is_of(self, answers: Any) -> bool:
        return [answer.logprobs for answer in answers] == self.request["logprobs"]


def test_equal_gradients_are_equal_and_others_are_not() -> None:
    case = CASES["grpo, loss_type dapo"]
    answers = next(given.draws(case))

    def distance(change: float) -> float:
        return given.policy_distance(case, answers, Mirror("grpo, loss_type dapo", change))  # type: ignore[arg-type]

    assert distance(1.0) < 1e-12
    assert distance(-1.0) == pytest.approx(2.0)
    with pytest.raises(SystemExit, match="is zero"):
        distance(0.0)


@pytest.mark.parametrize("name", CASES)
def test_each_case_has_draws_that_its_micro_batches_share(name: str) -> None:
    case = CASES[name]
    drawn = [*given.draws(case)]
    assert len(drawn) == given.NUM_DRAWS
    assert all(len(answers) % case.micros == 0 for answers in drawn)
    has_masked = [not all(all(answer.learned) for answer in answers) for answers in drawn]
    assert any(has_masked) is case.observations
    assert given.algorithm_of(case).loss is not None


def test_missing_answers_fill_groups_up() -> None:
    rows = given._filled_up(draw_case(0))
    assert len(rows) == 4 * given.GROUP
    assert sum(row is not None for row in rows) == len(draw_case(0))


def test_the_largest_difference_leaves_out_rows_without_a_bar() -> None:
    rows = [given.ppm_row("a", 3e-7, 1.0), given.ppm_row("b", 2e-6, 1.0), measured("c", 9.0, "")]
    *_, cases, largest = with_largest("x", iter(rows))
    assert [row.holds for row in rows] == [True, False, None]
    assert (cases.value, largest.value) == (2, 2.0)
