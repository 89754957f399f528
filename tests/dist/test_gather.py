"""Experts that 2 and 4 gloo ranks share, each of which gets the rows of all: equal bits."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from tests.dist.dispatcher_ranks import DTYPES, HIDDEN
from tests.dist.gather_ranks import CASES
from tests.dist.torchrun import torchrun

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("gather") / "4.json"
    return torchrun("gather_ranks.py", 4, out, str(out))


@pytest.mark.parametrize(("case", "dtype", "ep"), list(product(CASES, DTYPES, (2, 4))))
def test_gathered_rows_have_the_bits_of_one_rank(
    case: str, dtype: torch.dtype, ep: int, report: list[dict[str, Any]]
) -> None:
    for of_rank in report:
        found = of_rank[f"{case}, {dtype}"]
        assert found[f"ep {ep}"] == found["alone"]


def test_no_rows_give_none(report: list[dict[str, Any]]) -> None:
    assert [of_rank["no rows"]["shape"] for of_rank in report] == [[0, HIDDEN]] * 4


def test_outputs_differ_between_cases(report: list[dict[str, Any]]) -> None:
    """The negative control: digests tell rows and dtypes apart."""
    found = {of_rank[f"even, {dtype}"]["ep 4"] for of_rank in report for dtype in DTYPES}
    assert len(found) == 4 * len(DTYPES)
