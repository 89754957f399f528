"""Failures of shipped graders that end no run, and names of prompts in errors."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from spmd_rl.errors import DataError
from spmd_rl.hooks.context import CallInfo
from spmd_rl.hooks.rank.reward_tasks import RewardTasks
from spmd_rl.hooks.rank.tasks import Failed, SampleTask
from spmd_rl.hooks.results import describe, describe_episode
from spmd_rl.hooks.signatures import RewardForm
from spmd_rl.hooks.wire.messages import Problem
from spmd_rl.rewards.names import is_shipped
from spmd_rl.rollout.grading import Grading
from spmd_rl.types.prompts import FIRST_EVALUATED
from tests.unit.hooks.cases import make_prompt, make_sample

NAMES = ["math", "boxed_exact", "spmd_rl.rewards.answers.math:math", "rules.py:score"]


def failed(function: int, **problem: Any) -> Failed:
    """The event of a task whose call of a function had this problem."""
    group: Any = SimpleNamespace(add=lambda ids: None, cancel=lambda call: None)
    other: Any = SimpleNamespace(add=lambda ids: None)
    tasks = RewardTasks(NAMES, group, other, itertools.count())
    tasks.forms = [RewardForm(False, False, False)] * len(NAMES)
    tasks.open(9, SampleTask(make_prompt(), make_sample(), CallInfo(), frozenset({function})))
    assert [*tasks.route()] == []
    (event,) = tasks.take(Problem(0, 1.0, "took longer than 30 s", **problem))
    assert isinstance(event, Failed)
    return event


@pytest.mark.parametrize("function", range(4))
def test_a_shipped_grader_that_is_not_done_in_time_ends_no_run(function: int) -> None:
    assert failed(function, unanswered=True).is_spared == (function < 3)
    assert not failed(function).is_spared, "an error that it raises has another reason"
    assert is_shipped(NAMES[function]) == (function < 3)


@pytest.mark.parametrize("is_spared", [True, False])
def test_a_failure_that_is_spared_fails_its_sample(is_spared: bool) -> None:
    group: Any = SimpleNamespace(prompt=make_prompt(), grading={}, info=None, reward_time_s=0.0)
    lost: list[str] = []
    group.fail = lambda sample, error: lost.append(error)
    pool: Any = SimpleNamespace(submit=lambda task: 4)
    choice: Any = SimpleNamespace(of=lambda prompt: SimpleNamespace(numbers=frozenset({0})))
    grading = Grading(pool, choice, raises=True)
    grading.submit([(group, make_sample())])
    event = Failed(4, "reward math on prompt 1", "took longer than 30 s", 30.0, is_spared)
    if is_spared:
        assert grading.take(event) is group
        assert lost == ["reward math on prompt 1: took longer than 30 s"] and not group.grading
    else:
        with pytest.raises(DataError, match="took longer than 30 s"):
            grading.take(event)


def test_a_prompt_of_an_evaluation_has_its_number_in_the_set() -> None:
    prompt = make_prompt().replace(uid=FIRST_EVALUATED + 3)
    assert describe(prompt, [make_sample()]).startswith("evaluation prompt 3 sample ")
    assert describe_episode(prompt, 1).startswith("evaluation prompt 3 sample 1 ")
    assert describe(prompt.replace(uid=3), []).startswith("prompt 3 (")
