"""Which reward functions grade a prompt's samples."""

from __future__ import annotations

import numpy as np
import pytest

from spmd_rl.errors import ConfigError, DataError
from spmd_rl.rollout.grader_choice import GraderChoice, all_rewards
from spmd_rl.types.prompts import Prompt

NAMES = ["rules.py:score", "rules.py:order", "math"]
CHOICE = GraderChoice(NAMES, {"rules.py:score": 1.0, "rules.py:order": 0.5})


def prompt(**reward: float) -> Prompt:
    return Prompt(3, np.array([1], np.int32), source="train", reward=reward)


def test_a_prompt_without_rewards_of_its_own_has_those_of_the_run() -> None:
    graders = CHOICE.of(prompt())
    assert graders.weights == {"score": 1.0, "order": 0.5}
    assert graders.numbers == {0, 1}


def test_a_prompt_may_name_others() -> None:
    graders = CHOICE.of(prompt(math=2.0))
    assert (graders.weights, graders.numbers) == ({"math": 2.0}, {2})
    assert CHOICE.of(prompt(math=1.0)).weights == {"math": 1.0}


def test_a_reward_that_is_not_loaded_is_refused_with_its_remedy() -> None:
    with pytest.raises(DataError, match="prompt 3 of train: it names the reward 'code', but only"):
        CHOICE.of(prompt(code=1.0))


def test_no_reward_at_all_grades_nothing() -> None:
    assert not GraderChoice(["math"], {}).of(prompt()).numbers


def test_all_rewards_are_those_of_the_run_and_then_the_others_once_each() -> None:
    assert all_rewards({"a:x": 1.0}, ["b:y", "a:x"]) == ["a:x", "b:y"]
    with pytest.raises(ConfigError, match="two reward functions are called 'x'"):
        all_rewards({"a:x": 1.0}, ["b:x"])
