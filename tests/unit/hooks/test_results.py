"""Results of rewards: what they may be, how several add up, and how a sample is described."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from spmd_rl.hooks.results import (
    BadResult,
    Grade,
    as_grade,
    as_grades,
    describe,
    describe_episode,
    merged,
    preview,
    problem_of,
)
from tests.control_texts import COMMANDS, is_harmless
from tests.unit.hooks.cases import make_prompt, make_sample


class Silent:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("number", [1, True, 1.0, np.float32(1), np.int64(1)])
def test_a_number_is_a_grade(number: Any) -> None:
    assert as_grade(number) == Grade(1.0)
    assert type(as_grade(number).reward) is float


def test_a_mapping_is_a_grade_with_parts() -> None:
    parts = {"reward": 0.5, "form": 1.0, "3": 0.25}
    assert as_grade({"reward": 0.5, "form": 1, 3: 0.25}) == Grade(0.5, parts)


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (None, "returned no finite number as 'reward': None"),
        (math.nan, "returned no finite number as 'reward': nan"),
        (-math.inf, "returned no finite number as 'reward': -inf"),
        ("1", "returned no finite number as 'reward': '1'"),
        (b"1", "returned no finite number as 'reward': b'1'"),
        (10**400, "returned no finite number as 'reward': 1000"),
        (Silent(), "returned no finite number as 'reward': a Silent"),
        ([1.0], r"returned no finite number as 'reward': [1.0]"),
        ({"reward": "0.5"}, "returned no finite number as 'reward': '0.5'"),
        ({"reward": 1, "mean": 2}, "a value called 'mean', but reward/mean is a metric"),
        ({"reward": 1, "failed_samples": 2}, "a value called 'failed_samples'"),
        ({"form": 1.0}, "without the key 'reward': {'form': 1.0}"),
        ({"reward": 1.0, "form": "good"}, "as 'form': 'good'"),
        ({"reward": 1.0, 3: "good"}, "as '3': 'good'"),
    ],
)
def test_anything_else_is_told(result: Any, problem: str) -> None:
    with pytest.raises(BadResult) as told:
        as_grade(result)
    assert problem in str(told.value)


def test_texts_that_utf8_cannot_encode_are_escaped() -> None:
    assert as_grade({"reward": 1.0, "\ud800": 2.0}).parts == {"reward": 1.0, "\\ud800": 2.0}
    assert preview(ValueError("\ud800"), str) == "\\ud800"


@pytest.mark.parametrize("result", ["x" * 10**6, {"form": "x" * 10**6}, {"x" * 10**6: None}])
def test_not_all_of_a_long_value_is_shown(result: Any) -> None:
    with pytest.raises(BadResult, match="xxx") as told:
        as_grade(result)
    assert len(str(told.value)) < 1000


def test_a_group_has_one_result_a_sample() -> None:
    grades = [Grade(1.0), Grade(0.5, {"reward": 0.5})]
    assert as_grades([1, {"reward": 0.5}], 2) == grades
    assert as_grades(np.array([1.0, 2.0]), 2) == [Grade(1.0), Grade(2.0)]


@pytest.mark.parametrize(
    ("results", "problem"),
    [
        (1.0, "returned no list with one result a sample: 1.0"),
        ("ab", "returned no list with one result a sample: 'ab'"),
        ({0: 1.0, 1: 2.0}, "returned no list with one result a sample"),
        (iter([1.0, 2.0]), "returned no list with one result a sample"),
        ([1.0], "returned 1 results for 2 samples"),
        ([1.0, 1.0, 1.0], "returned 3 results for 2 samples"),
        ([], "returned 0 results for 2 samples"),
        ([1.0, None], "returned no finite number as 'reward': None"),
    ],
)
def test_another_result_for_a_group_is_told(results: Any, problem: str) -> None:
    with pytest.raises(BadResult) as told:
        as_grades(results, 2)
    assert problem in str(told.value)


def test_several_rewards_add_up_with_their_weights() -> None:
    grades = {"form": Grade(1.0), "judge": Grade(0.5, {"reward": 0.5, "sure": 0.9})}
    total = merged(grades, {"form": 0.2, "judge": 2.0})
    assert total.reward == 1.2
    assert total.parts == {"form": 1.0, "judge": 0.5, "judge.sure": 0.9}


def test_a_sample_is_described_with_its_texts() -> None:
    prompt, sample = make_prompt(), make_sample("84")
    assert describe(prompt, [sample]) == (
        "prompt 7 sample 3 (prompt '37+48=', answer '85', response '84')"
    )
    assert describe(prompt, [sample, sample]) == (
        "prompt 7 (prompt '37+48=', answer '85', 2 samples)"
    )
    assert describe_episode(prompt, 2) == "prompt 7 sample 2 (prompt '37+48=', answer '85')"


def test_a_preview_never_fails() -> None:
    assert preview(Silent()) == "a Silent"
    assert preview("x" * 300, str) == "x" * 200 + "..."


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_what_a_hook_raises_does_not_command_the_terminal(command: str) -> None:
    problem = problem_of(ValueError(f"cannot read {command}"), max)
    assert is_harmless(problem)
    assert problem.startswith("raised ValueError: cannot read ")


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (1e300, "returned 1e\\+300 as 'reward': expected at most 1e\\+15 in size"),
        ({"reward": 1.0, "part": -1e16}, "as 'part': expected at most"),
        (10**400, "no finite number as 'reward'"),
        ({"reward": 1.0} | {f"part {number}": 0.0 for number in range(1000)}, "1001 values"),
    ],
)
def test_numbers_of_which_no_mean_or_variance_is_finite_are_refused(
    result: Any, problem: str
) -> None:
    with pytest.raises(BadResult, match=problem):
        as_grade(result)
    assert as_grade(-1e15).reward == -1e15
