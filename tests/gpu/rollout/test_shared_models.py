"""A model over 2, 4 and 8 ranks: sums with bits of torch, and an engine with those of one GPU.

Sizes for which there are too few GPUs are left out, unless ranks may share them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.torchrun import torchrun
from tests.shared_gpus import can_run

pytestmark = pytest.mark.timeout(400)
SIZES = [tp for tp in (2, 4, 8) if tp == 2 or can_run(tp)]
Report = list[dict[str, Any]]


def run(what: str, folder: Path) -> dict[int, Any]:
    """Return the reports of each size, by size: of a world of so many ranks."""
    found = {}
    for tp in SIZES:
        out = folder / f"{what}{tp}.json"
        words = (tp, out, what, str(out))
        found[tp] = torchrun("rollout/shared_model_ranks.py", *words, room="gpu", timeout_s=380)
    return found


@pytest.fixture(scope="module")
def exchanges(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Report]:
    return run("exchanges", tmp_path_factory.mktemp("exchanges"))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Report]:
    return run("engines", tmp_path_factory.mktemp("engines"))


@pytest.mark.parametrize("tp", SIZES)
def test_calls_have_the_bits_of_torch(tp: int, exchanges: dict[int, Report]) -> None:
    for of_rank in exchanges[tp]:
        assert of_rank["calls"] == []
        assert tp == 2 or of_rank["control"] > 0.05


@pytest.mark.parametrize("way", ["symm", "torch"])
@pytest.mark.parametrize("tp", SIZES)
def test_draws_by_parts_of_the_vocabulary_are_those_of_rows(
    tp: int, way: str, exchanges: dict[int, Report]
) -> None:
    for of_rank in exchanges[tp]:
        assert of_rank[f"{way}, draws"] == []


@pytest.mark.parametrize("tp", SIZES)
def test_graphs_may_be_replayed_in_any_order(tp: int, exchanges: dict[int, Report]) -> None:
    for of_rank in exchanges[tp]:
        assert of_rank["replays"] == 0


@pytest.mark.parametrize("way", ["symm", "torch"])
@pytest.mark.parametrize("tp", SIZES)
def test_samples_are_those_of_one_gpu(tp: int, way: str, engines: dict[int, Report]) -> None:
    """With sums in as many parts. A model that sums in one part draws others."""
    for of_rank in engines[tp]:
        for batch in (24, 5):
            case = f"{way}, {batch} at once"
            assert of_rank[case] == 0
            assert (of_rank[f"{case}, graphs"] > 2) == (way == "symm")
        assert of_rank["control"] > 0
