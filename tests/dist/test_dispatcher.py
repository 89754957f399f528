"""A mixture over 1, 2 and 4 gloo ranks: equal bits of outputs and of all gradients."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.kernels.runtime.neighbour_sums import sum_neighbours
from tests.dist.dispatcher_ranks import CASES, DTYPES, EXPERTS, KINDS
from tests.dist.torchrun import torchrun

pytestmark = pytest.mark.dist

Report = list[dict[str, Any]]  # of each rank


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    out = tmp_path_factory.mktemp("dispatcher") / "4.json"
    return torchrun("dispatcher_ranks.py", 4, out, str(out))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("case", "dtype", "ep"), list(product(CASES, DTYPES, (2, 4))))
def test_bits_do_not_depend_on_how_many_ranks_share_experts(
    case: str, dtype: torch.dtype, ep: int, kind: str, report: Report
) -> None:
    compared = set()
    for of_rank in report:
        alone = of_rank[f"{case}, {dtype}, ep 1, torch"]
        shared = of_rank[f"{case}, {dtype}, ep {ep}, {kind}"]
        own = [name for name in shared if name.startswith("experts.")]
        assert len(own) == 3 * EXPERTS // ep
        assert shared == {name: alone[name] for name in shared}
        for name in ("out", "x", "gate.weight"):
            assert shared[f"{name} again"] == shared[name]
        compared |= set(own)
    assert len(compared) == 3 * EXPERTS
    assert {"out", "out without gradients", "x", "gate.weight"} < set(shared)


def test_sums_that_each_rank_rounds_have_other_bits(report: Report) -> None:
    for of_rank in report:
        assert of_rank["control"]["partial"] != of_rank["control"]["exact"]


def test_gradients_that_are_summed_rank_by_rank_have_other_bits(report: Report) -> None:
    found = report[0]["even, torch.float32, ep 1, torch"]
    names = [name for name in found if name.startswith("experts.")]
    assert any(found[name] != found[f"rank by rank, {name}"] for name in names)


def test_experts_that_ranks_cannot_share_evenly_are_refused(report: Report) -> None:
    for of_rank in report:
        assert of_rank["refused"]["sentence"] == "4 ranks cannot share 6 experts evenly"


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 99))
def test_a_sum_of_neighbours_does_not_depend_on_groups(log2: int, inner: int, seed: int) -> None:
    parts = torch.randn(1 << log2, 50, generator=torch.Generator().manual_seed(seed))
    parts *= torch.logspace(-3, 3, len(parts)).unsqueeze(1)
    whole = sum_neighbours(parts.clone().unbind())
    groups = parts.clone().split(1 << min(inner, log2))
    assert torch.equal(sum_neighbours([sum_neighbours(one.unbind()) for one in groups]), whole)
    torch.testing.assert_close(whole, parts.sum(0), rtol=1e-5, atol=1e-4)


def test_three_parts_are_added_in_their_order() -> None:
    first, second, third = torch.randn(3, 50)
    expected = (first + second) + third
    assert torch.equal(sum_neighbours([first, second, third]), expected)
