from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from spmd_rl.algo.advantages import group_advantage, rloo_advantage
from spmd_rl.errors import ConfigError, DataError
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

REWARDS = arrays(np.float64, st.integers(2, 12), elements=st.floats(-5, 5))


def _group(rewards: np.ndarray) -> Group:
    none = np.zeros(0, np.int32)
    samples = [
        Sample(0, i, none, none.astype(np.float32), none, "completed", reward=float(r))
        for i, r in enumerate(rewards)
    ]
    return Group(Prompt(0, none), samples)


def test_by_hand(make_group) -> None:
    # Rewards 1 0 0 0: mean 1/4, squares 9/16 + 3/16 = 3/4, over G - 1 = 3 gives a std of 1/2.
    (values,) = group_advantage([make_group([1, 0, 0, 0])])
    np.testing.assert_allclose(
        values, np.array([0.75, -0.25, -0.25, -0.25]) / (0.5 + 1e-6), rtol=1e-15
    )


def test_each_prompt_is_its_own_group_and_sizes_may_differ(make_group) -> None:
    easy, hard = make_group([1, 1, 0]), make_group([0, 0.1], uid=1)
    together = group_advantage([easy, hard])
    np.testing.assert_array_equal(together[0], group_advantage([easy])[0])
    np.testing.assert_array_equal(together[1], group_advantage([hard])[0])
    over_the_batch = np.concatenate([easy.rewards, hard.rewards])
    over_the_batch = (over_the_batch - over_the_batch.mean()) / (over_the_batch.std(ddof=1) + 1e-6)
    assert not np.allclose(np.concatenate(together), over_the_batch, atol=0.1)


def test_equal_rewards_teach_exactly_nothing(make_group) -> None:
    for value in (0.0, 1.0, 0.1):
        assert not group_advantage([make_group([value] * 3)])[0].any()


def test_one_sample_is_refused(make_group) -> None:
    for estimator in (group_advantage, rloo_advantage):
        with pytest.raises(ConfigError, match=r"prompt 4 has 1 sample.*num_samples"):
            estimator([make_group([1.0], uid=4)])


def test_a_reward_that_is_not_a_number_is_refused(make_group) -> None:
    with pytest.raises(DataError, match="prompt 2, sample 1: the reward is nan"):
        group_advantage([make_group([1.0, float("nan")], uid=2)])


@given(REWARDS)
def test_grpo_against_its_definition(rewards: np.ndarray) -> None:
    (values,) = group_advantage([_group(rewards)])
    # a rounded mean over 1e-6 would be no definition
    exact = [Fraction(reward) for reward in rewards.tolist()]
    centred = [reward - sum(exact) / len(exact) for reward in exact]
    std = sqrt(sum(one * one for one in centred) / (len(exact) - 1))
    np.testing.assert_allclose(
        values, [float(one) / (std + 1e-6) for one in centred], rtol=1e-9, atol=1e-9
    )


@given(REWARDS)
def test_rloo_is_the_reward_less_the_mean_of_the_others(rewards: np.ndarray) -> None:
    (values,) = rloo_advantage([_group(rewards)])
    others = [rewards[i] - np.delete(rewards, i).mean() for i in range(len(rewards))]
    np.testing.assert_allclose(values, others, atol=1e-12)


@given(REWARDS)
def test_without_std_advantages_are_centred_rewards(rewards: np.ndarray) -> None:
    (values,) = group_advantage([_group(rewards)], use_std=False)
    np.testing.assert_allclose(values, rewards - rewards.mean(), atol=1e-12)


def test_a_group_goes_on_without_a_failed_sample_and_an_emptied_one_teaches_nothing(
    make_group, failed
) -> None:
    """A group that was meant to have a single sample is refused as ever."""
    left, emptied = (
        make_group([1, 0, 0]),
        replace(make_group([], uid=1), failed=failed("slow", "slow")),
    )
    for estimate in (group_advantage, rloo_advantage):
        values = estimate([replace(left, failed=failed("slow")), emptied])
        np.testing.assert_array_equal(values[0], estimate([left])[0])
        assert values[1].shape == (0,)
        with pytest.raises(ConfigError, match="num_samples to 2 or more"):
            estimate([make_group([1])])


@given(REWARDS, st.data())
def test_an_execution_counts_once_however_many_samples_it_has(
    rewards: np.ndarray, data: st.DataObject
) -> None:
    """Siblings with equal rewards get what their execution would get with one sample."""
    single = _group(rewards)
    counts = data.draw(st.lists(st.integers(1, 3), min_size=len(rewards), max_size=len(rewards)))
    samples = [
        sample.replace(index=8 * number + sample.index, execution=sample.index if count > 1 else -1)
        for sample, count in zip(single.samples, counts, strict=True)
        for number in range(count)
    ]
    order = data.draw(st.permutations(range(len(samples))))
    siblings = replace(single, samples=[samples[place] for place in order])
    owner = np.repeat(np.arange(len(rewards)), counts)[order]
    for estimator in (group_advantage, rloo_advantage):
        (expected,), (values,) = estimator([single]), estimator([siblings])
        np.testing.assert_allclose(values, expected[owner], rtol=1e-6, atol=1e-6)


def test_siblings_alone_do_not_count_more() -> None:
    """Rewards 1 and 0, of which the first is of three siblings: the mean is 1/2, not 3/4."""
    (one, *_, zero) = _group(np.array([1.0, 1.0, 1.0, 0.0])).samples
    siblings = [one.replace(index=index, execution=0) for index in (0, 2, 4)]
    group = Group(Prompt(0, np.zeros(0, np.int32)), [*siblings, zero])
    (values,) = group_advantage([group], use_std=False)
    np.testing.assert_allclose(values, [0.5, 0.5, 0.5, -0.5])
