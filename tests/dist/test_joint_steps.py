"""Engines that share experts and record decoding, on gloo ranks with graphs of the host."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.recipes.mixtures import write_mixture
from tests.dist.torchrun import torchrun

pytestmark = pytest.mark.dist

Report = list[dict[str, Any]]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("joint")
    model, out = write_mixture(folder / "model", "qwen3_moe"), folder / "out.json"
    return torchrun("joint_ranks.py", 4, out, str(model), str(out))


@pytest.mark.parametrize("ep", [2, 4])
def test_samples_are_those_of_an_engine_with_all_experts(ep: int, report: Report) -> None:
    """Tokens, log-probs, hashes and recorded routes, after aborts and with few pages."""
    for of_rank in report:
        assert of_rank[f"ep {ep}"] == of_rank["alone"]
    assert [len(of_rank["alone"]) for of_rank in report] == [9, 15, 21, 0]


@pytest.mark.parametrize("ep", [2, 4])
def test_all_ranks_replay_equally_many_rows(ep: int, report: Report) -> None:
    """Also a rank without any request of its own."""
    groups = [report[first : first + ep] for first in range(0, 4, ep)]
    for group in groups:
        first, *others = (of_rank[f"sizes {ep}"] for of_rank in group)
        assert others == [first] * (ep - 1)
        assert len(set(first)) > 2
    assert report[3][f"graphs {ep}"] == len(set(report[3][f"sizes {ep}"]))


def test_requests_differ_between_ranks(report: Report) -> None:
    """The negative control: a rank's samples are its own."""
    assert report[0]["alone"]["0/0"] != report[1]["alone"]["0/0"]
