"""Credit by turn, against sums written out in plain Python, and comparison by agent."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.algo.advantages import group_advantage
from spmd_rl.algo.agents import compared_by_agent
from spmd_rl.algo.config import PolicyConfig
from spmd_rl.algo.make import make_algorithm
from spmd_rl.algo.turns import by_turn, less_mean_return
from spmd_rl.errors import DataError
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import AGENT, TURN_RECORDS, Sample

TURN = st.tuples(
    st.integers(1, 3),  # tokens that it draws
    st.integers(0, 2),  # tokens that are observed after it
    st.sampled_from(["", "a", "b", "c"]),  # the state
    st.sampled_from([0.0, 0.5, 1.0, -1.0]),  # the reward
)
EPISODE = st.tuples(st.lists(TURN, min_size=1, max_size=4), st.sampled_from([0.0, 1.0, 2.0]))
Turns = list[tuple[int, int, str, float]]


def sample_of(index: int, turns: Turns, score: float, **metadata: Any) -> Sample:
    """A sample of recorded turns, whose reward is that of the turns and `score`."""
    versions: list[int] = []
    records = []
    for drawn, observed, state, reward in turns:
        place = {"first_token": len(versions), "num_tokens": drawn}
        records.append({"state": state, "reward": reward, "agent": "", **place})
        versions += [0] * drawn + [-1] * observed
    zeros = np.zeros(len(versions), np.int32)
    return Sample(
        7,
        index,
        zeros,
        zeros.astype(np.float32),
        np.array(versions, np.int32),
        "completed",
        reward=sum(turn[3] for turn in turns) + score,
        metadata={TURN_RECORDS: records, **metadata},
    )


def group_of(episodes: list[tuple[Turns, float]]) -> Group:
    prompt = Prompt(7, np.array([1, 2], np.int32))
    return Group(prompt, [sample_of(index, *episode) for index, episode in enumerate(episodes)])


def returns_of(turns: Turns, score: float, discount: float) -> list[float]:
    rewards = [turn[3] for turn in turns]
    rewards[-1] += score
    return [
        sum(discount ** (k - t) * rewards[k] for k in range(t, len(rewards)))
        for t in range(len(rewards))
    ]


def advantages(group: Group, name: str, **settings: Any) -> list[float]:
    made = make_algorithm(PolicyConfig(algorithm=name, **settings), num_samples=4)  # type: ignore[arg-type]
    batch = made.pack([group])
    return [float(value) for value in batch.advantages[batch.mask]]


@given(st.lists(EPISODE, min_size=2, max_size=4), st.sampled_from([1.0, 0.9, 0.5]))
def test_turn_returns_have_one_baseline(
    episodes: list[tuple[Turns, float]], discount: float
) -> None:
    returns = [returns_of(*episode, discount) for episode in episodes]
    mean = sum(map(sum, returns)) / sum(map(len, returns))
    expected = [
        value - mean
        for (turns, _), own in zip(episodes, returns, strict=True)
        for (drawn, *_), value in zip(turns, own, strict=True)
        for _ in range(drawn)
    ]
    found = advantages(group_of(episodes), "turn_returns", discount=discount)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [1, 3, 6, 7])
def test_equal_returns_teach_nothing(count: int) -> None:
    """Their mean in floats may differ from them by a bit."""
    turns: list[Any] = [SimpleNamespace(returns=0.1) for _ in range(count)]
    assert less_mean_return(turns).tolist() == [0.0] * count


@given(
    st.lists(EPISODE, min_size=2, max_size=4),
    st.sampled_from([1.0, 0.9]),
    st.sampled_from([0.0, 1.0, 0.5]),
)
def test_gigpo_compares_episodes_and_turns_from_one_state(
    episodes: list[tuple[Turns, float]], discount: float, weight: float
) -> None:
    totals = [sum(turn[3] for turn in turns) + score for turns, score in episodes]
    mean = sum(totals) / len(totals)
    std = sqrt(sum((one - mean) ** 2 for one in totals) / (len(totals) - 1))
    of_state: dict[str, list[float]] = {}
    for turns, score in episodes:
        for turn, value in zip(turns, returns_of(turns, score, discount), strict=True):
            of_state.setdefault(turn[2], []).append(value)

    def among(state: str, value: float) -> float:
        others = of_state[state]
        if not state or len(others) == 1:
            return 0.0
        centre = sum(others) / len(others)
        spread = sqrt(sum((one - centre) ** 2 for one in others) / (len(others) - 1))
        return (value - centre) / (spread + 1e-6)

    expected = [
        (total - mean) / (std + 1e-6) + weight * among(turn[2], value)
        for (turns, score), total in zip(episodes, totals, strict=True)
        for turn, value in zip(turns, returns_of(turns, score, discount), strict=True)
        for _ in range(turn[0])
    ]
    found = advantages(group_of(episodes), "gigpo", discount=discount, turn_weight=weight)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_the_samples_of_one_execution_are_one_line_of_turns() -> None:
    """A template that rewrites has cut the first episode in two."""
    first, second, other = [(1, 1, "", 0.5)], [(2, 0, "", 0.0)], [(1, 0, "", 0.0)]
    group = group_of([(first, 1.0), (second, 1.0), (other, 0.0)])
    reward = 1.5  # of the whole episode, on both of its samples
    cut = [one.replace(execution=0, reward=reward) for one in group.samples[:2]]
    group = replace(group, samples=[*cut, group.samples[2].replace(execution=2)])
    returns = [1.5, 1.0, 1.0, 0.0]  # of the first turn, the second's two tokens, and the other
    mean = (1.5 + 1.0 + 0.0) / 3
    found = advantages(group, "turn_returns")
    np.testing.assert_allclose(found, [value - mean for value in returns], rtol=1e-6)


def test_the_reward_of_an_execution_is_that_of_its_first_sample() -> None:
    group = group_of([([(1, 0, "", 0.0)], 1.0), ([(1, 0, "", 0.0)], 5.0), ([(1, 0, "", 0.0)], 0.0)])
    cut = [one.replace(execution=0) for one in group.samples[:2]]
    group = replace(group, samples=[*cut, group.samples[2].replace(execution=2)])
    found = advantages(group, "turn_returns")
    np.testing.assert_allclose(found, [value - 2 / 3 for value in (1.0, 1.0, 0.0)], rtol=1e-6)


def test_turns_without_records_leave_what_is_observed_at_zero() -> None:
    episodes = [
        ([(2, 2, "", 0.0), (1, 1, "", 0.0)], 1.0),
        ([(1, 1, "", 0.0), (2, 0, "", 0.0)], 0.0),
    ]
    group = group_of(episodes)
    plain = [one.replace(metadata={}) for one in group.samples]
    (found,) = by_turn([replace(group, samples=plain)], less_mean_return, 1.0)
    half = [0.5, 0.5, 0.0, 0.0, 0.5, 0.0]
    np.testing.assert_array_equal(found, [*half, -0.5, 0.0, -0.5, -0.5])


def test_an_agent_is_compared_with_itself() -> None:
    """The players of a game have rewards that are opposite, and one of them never had a turn."""
    turns: Turns = [(2, 0, "", 0.0)]
    rewards = {"first": [1.0, -1.0, 1.0], "second": [-1.0, 1.0], "third": [5.0]}
    samples = [
        sample_of(index + 3 * player, turns, reward, agent=name).replace(execution=index)
        for player, (name, values) in enumerate(rewards.items())
        for index, reward in enumerate(values)
    ]
    group = Group(Prompt(7, np.array([1], np.int32)), samples)
    (found,) = compared_by_agent(group_advantage)([group])
    alone = [one.replace(metadata={}) for one in samples]
    expected = [
        *group_advantage([replace(group, samples=alone[:3])])[0],
        *group_advantage([replace(group, samples=alone[3:5])])[0],
        0.0,
    ]
    np.testing.assert_array_equal(found, expected)
    assert samples[0].metadata[AGENT] == "first"
    by_turn = advantages(group, "turn_returns")
    centred = [1 - 1 / 3] * 2 + [-1 - 1 / 3] * 2 + [1 - 1 / 3] * 2 + [-1.0] * 2 + [1.0] * 2
    np.testing.assert_allclose(by_turn, [*centred, 0.0, 0.0], rtol=1e-6)
    (mixed,) = group_advantage([replace(group, samples=alone)])
    assert not np.allclose(mixed, found), "a negative control"


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"first_token": 2, "num_tokens": 2}, "lie outside its tokens"),
        ({"first_token": -1, "num_tokens": 1}, "lie outside its tokens"),
        ({"first_token": "x", "num_tokens": 1}, "its turns: ValueError"),
        ({"num_tokens": 1}, "its turns: KeyError"),
        ({"first_token": 0, "num_tokens": 1, "reward": float("nan")}, "must be finite numbers"),
    ],
)
def test_records_that_do_not_fit_name_the_sample(record: dict[str, Any], problem: str) -> None:
    group = group_of([([(3, 0, "", 0.0)], 1.0), ([(3, 0, "", 0.0)], 0.0)])
    bad = [{"state": "", "reward": 0.0} | record]
    broken = group.samples[1].replace(metadata={TURN_RECORDS: bad})
    with pytest.raises(DataError, match=f"prompt 7, sample 1: .*{problem}"):
        advantages(replace(group, samples=[group.samples[0], broken]), "turn_returns")
