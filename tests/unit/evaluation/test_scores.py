"""Scores of graded samples, against the enumeration of all draws."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.evaluation.scores import metrics_of_sets, pass_at_k, powers_of_two, scores
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample, SampleStatus


def sample(
    index: int, reward: float, status: SampleStatus = "completed", length: int = 2
) -> Sample:
    tokens = np.zeros(length, np.int32)
    return Sample(0, index, tokens, tokens.astype(np.float32), tokens, status, reward=reward)


def group(*rewards: float, num_failed: int = 0) -> Group:
    samples = [sample(index, reward) for index, reward in enumerate(rewards)]
    failed = [sample(len(rewards) + i, float("nan"), "failed") for i in range(num_failed)]
    return Group(Prompt(0, np.zeros(1, np.int32)), samples, failed)


@pytest.mark.parametrize("num_samples", range(1, 8))
def test_pass_at_k_is_the_share_of_draws_with_a_correct_sample(num_samples: int) -> None:
    for num_correct in range(num_samples + 1):
        answers = [index < num_correct for index in range(num_samples)]
        for k in range(1, num_samples + 1):
            expected = fmean(any(draw) for draw in combinations(answers, k))
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(expected, abs=1e-12)


@given(st.integers(1, 5000), st.data())
def test_pass_at_k_of_many_samples_is_a_chance(num_samples: int, data: st.DataObject) -> None:
    num_correct = data.draw(st.integers(0, num_samples))
    k = data.draw(st.integers(1, num_samples))
    chance = pass_at_k(num_samples, num_correct, k)
    assert 0 <= chance <= 1
    assert pass_at_k(num_samples, num_correct, 1) == pytest.approx(num_correct / num_samples)
    if k < num_samples:
        assert chance <= pass_at_k(num_samples, num_correct, k + 1) + 1e-12
    if num_correct < num_samples:
        assert chance <= pass_at_k(num_samples, num_correct + 1, k) + 1e-12


@pytest.mark.parametrize(("n", "c", "k"), [(2, 3, 1), (2, -1, 1), (2, 1, 0), (2, 1, 3)])
def test_what_no_samples_can_be_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at_k(n, c, k)


def test_which_k_there_are() -> None:
    assert [powers_of_two(n) for n in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 8]]


def test_scores_of_a_set() -> None:
    found = scores([group(1, 0, 0, 0), group(0.5, 0.5, 1, 1)], 4, threshold=1.0)
    assert found["reward"] == pytest.approx((0.25 + 0.75) / 2)
    assert found["reward_error"] == pytest.approx(0.25)
    assert found["avg@4"] == found["pass@1"] == pytest.approx((0.25 + 0.5) / 2)
    assert found["pass@2"] == pytest.approx((1 / 2 + 5 / 6) / 2)
    assert found["pass@4"] == 1
    assert (found["truncated"], found["response_tokens_mean"]) == (0, 2)
    assert found["failed_samples"] == 0


def test_a_lower_threshold_makes_more_samples_correct() -> None:
    groups = [group(0.5, 0.2)]
    assert scores(groups, 2, threshold=1.0)["avg@2"] == 0
    assert scores(groups, 2, threshold=0.5)["avg@2"] == 0.5


def test_failed_samples_are_counted_and_are_no_wrong_ones() -> None:
    found = scores([group(1, num_failed=1), group(0, 1), group(num_failed=2)], 2, 1.0)
    assert found["failed_samples"] == 3
    assert found["reward"] == pytest.approx(0.75)
    assert found["avg@2"] == pytest.approx(0.75)
    assert found["pass@2"] == 1  # of the one prompt with two samples


def test_a_set_whose_samples_all_failed_has_no_score() -> None:
    assert scores([group(num_failed=2)], 2, 1.0) == {"failed_samples": 2}


def test_sets_weigh_alike_in_the_mean() -> None:
    large = scores([group(1)] * 9, 1, 1.0)
    small = scores([group(0)], 1, 1.0)
    metrics = metrics_of_sets({"large": large, "small": small, "none": {"failed_samples": 1.0}})
    assert metrics["eval/reward"] == metrics["eval/pass@1"] == 0.5
    assert metrics["eval/large/avg@1"] == 1
    assert "reward_error" not in small
    assert metrics["eval/none/failed_samples"] == 1
