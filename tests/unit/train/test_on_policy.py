"""Effective sample size and chi-square of the ratios of two policies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spmd_rl.kernels.moe.route_hash import ROUTES
from spmd_rl.train.on_policy import _ratio_metrics, compare_routes


def test_equal_policies_have_all_samples() -> None:
    assert _ratio_metrics(0.0, 0.0) == {"onpolicy/chi2": 0.0, "onpolicy/ess": 1.0}


def test_one_sample_of_four_counts_alone() -> None:
    ratios = [4.0, 0.0, 0.0, 0.0]
    mean = sum(ratio - 1 for ratio in ratios) / 4
    mean_square = sum(ratio**2 - 1 for ratio in ratios) / 4
    assert _ratio_metrics(mean, mean_square)["onpolicy/ess"] == pytest.approx(1 / 4)


def test_policies_without_a_common_token_have_no_sample() -> None:
    assert _ratio_metrics(-1.0, -1.0) == {"onpolicy/chi2": -1.0, "onpolicy/ess": 0.0}


def test_tokens_of_other_experts_are_counted_under_the_weights_that_drew_them() -> None:
    micro: Any = SimpleNamespace(
        versions=torch.tensor([3, 3, 2, -1], dtype=torch.int32),
        columns={ROUTES: torch.tensor([7, 8, 9, 0], dtype=torch.int32)},
    )
    here = torch.tensor([7, 5, 5, 5], dtype=torch.int32)
    added: list[float] = []
    sums: Any = SimpleNamespace(add=lambda name, values: added.append(float(values.sum())))
    for version in (3, 2, None):
        compare_routes(here, micro, version, sums)
    assert added == [1.0, 1.0, 0.0]
    micro.columns.clear()
    compare_routes(here, micro, 3, sums)
    assert len(added) == 3
