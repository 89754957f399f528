"""The reward that an environment gave, as a grader among others."""

from __future__ import annotations

import pytest

from spmd_rl.errors import DataError
from spmd_rl.hooks.results import as_grade, merged
from spmd_rl.rewards.answers.environment import environment
from tests.unit.hooks.cases import make_prompt, make_sample


def test_it_is_the_reward_of_the_sample_with_its_parts() -> None:
    sample = make_sample().replace(reward=0.75, parts={"reward": 0.75, "right": 1.0})
    grade = as_grade(environment(make_prompt(), sample))
    assert grade.reward == 0.75
    both = merged(
        {"environment": grade, "score": as_grade(2.0)}, {"environment": 2.0, "score": 0.5}
    )
    assert both.reward == 2.5
    assert both.parts == {"environment": 0.75, "environment.right": 1.0, "score": 2.0}


def test_a_sample_that_nothing_graded_is_refused() -> None:
    with pytest.raises(DataError, match="nothing gave it a reward"):
        environment(make_prompt(), make_sample())
