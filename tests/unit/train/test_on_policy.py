"""Effective sample size and chi-square of the ratios of two policies."""

from __future__ import annotations

import pytest

from spmd_rl.train.on_policy import _ratio_metrics


def test_equal_policies_have_all_samples() -> None:
    assert _ratio_metrics(0.0, 0.0) == {"onpolicy/chi2": 0.0, "onpolicy/ess": 1.0}


def test_one_sample_of_four_counts_alone() -> None:
    ratios = [4.0, 0.0, 0.0, 0.0]
    mean = sum(ratio - 1 for ratio in ratios) / 4
    mean_square = sum(ratio**2 - 1 for ratio in ratios) / 4
    assert _ratio_metrics(mean, mean_square)["onpolicy/ess"] == pytest.approx(1 / 4)


def test_policies_without_a_common_token_have_no_sample() -> None:
    assert _ratio_metrics(-1.0, -1.0) == {"onpolicy/chi2": -1.0, "onpolicy/ess": 0.0}
