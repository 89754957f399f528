"""The example of an environment: its world, and that halving finds each number."""

from __future__ import annotations

import pytest

from examples.environments.higher_lower import HigherLower
from tests.unit.environments.cases import SpokenEngine, chat_prompt, episode

HALVING = {1: "421", 2: "42", 3: "423", 4: "4", 5: "465", 6: "46", 7: "467"}


@pytest.mark.parametrize("number", HALVING)
def test_halving_finds_each_number(number: int) -> None:
    (sample,) = episode(
        HigherLower(), SpokenEngine(HALVING[number]), chat_prompt(answer=str(number))
    )
    assert sample.reward == 1.0
    assert sample.answer == str(number)


@pytest.mark.parametrize(("said", "reward"), [("123", 0.0), ("x", -0.5), ("8", -0.5)])
def test_other_guesses_do_not(said: str, reward: float) -> None:
    (sample,) = episode(HigherLower(), SpokenEngine(said), chat_prompt(answer="7"))
    assert sample.reward == reward
