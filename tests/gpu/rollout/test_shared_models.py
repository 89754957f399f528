"""A model over 2 and 4 GPUs: sums with the bits of torch's, and an engine with those of one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.torchrun import torchrun

pytestmark = pytest.mark.timeout(400)
SIZES = (2, 4)
Report = list[dict[str, Any]]


def run(what: str, folder: Path) -> Any:
    out = folder / f"{what}.json"
    script = "rollout/shared_model_ranks.py"
    return torchrun(script, max(SIZES), out, what, str(out), room="gpu", timeout_s=380)


@pytest.fixture(scope="module")
def exchanges(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run("exchanges", tmp_path_factory.mktemp("exchanges"))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run("engines", tmp_path_factory.mktemp("engines"))


@pytest.mark.parametrize("tp", SIZES)
def test_calls_have_the_bits_of_torch(tp: int, exchanges: Report) -> None:
    for of_rank in exchanges:
        assert of_rank[f"tp {tp}, calls"] == []
        assert tp == 2 or of_rank[f"tp {tp}, control"] > 0.05


@pytest.mark.parametrize("way", ["symm", "torch"])
@pytest.mark.parametrize("tp", SIZES)
def test_draws_by_parts_of_the_vocabulary_are_those_of_rows(
    tp: int, way: str, exchanges: Report
) -> None:
    for of_rank in exchanges:
        assert of_rank[f"tp {tp}, {way}, draws"] == []


@pytest.mark.parametrize("tp", SIZES)
def test_graphs_may_be_replayed_in_any_order(tp: int, exchanges: Report) -> None:
    for of_rank in exchanges:
        assert of_rank[f"tp {tp}, replays"] == 0


@pytest.mark.parametrize("way", ["symm", "torch"])
@pytest.mark.parametrize("tp", SIZES)
def test_samples_are_those_of_one_gpu(tp: int, way: str, engines: Report) -> None:
    """With sums in as many parts. A model that sums in one part draws others."""
    for of_rank in engines:
        for batch in (24, 5):
            case = f"tp {tp}, {way}, {batch} at once"
            assert of_rank[case] == 0
            assert (of_rank[f"{case}, graphs"] > 2) == (way == "symm")
        assert of_rank[f"tp {tp}, control"] > 0
