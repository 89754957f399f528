"""A checkpoint of two gloo ranks, loaded on one, two, three and four."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.torchrun import torchrun
from tests.dist.train_case import write_model_folder

pytestmark = pytest.mark.dist

Report = dict[str, Any]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def whole(work: Path) -> Report:
    """Two ranks that save, and go on."""
    return run(work, "whole", ranks=2, dp=1)


def run(work: Path, name: str, *words: str, ranks: int, dp: int) -> Report:
    out = work / f"{name}.json"
    return torchrun(
        "checkpoint_ranks.py", ranks, out, str(work), str(dp), str(out), str(work / "saved"), *words
    )


def test_the_same_ranks_go_on_with_the_same_bits(work: Path, whole: Report) -> None:
    resumed = run(work, "two", "resume", ranks=2, dp=1)
    assert resumed == whole
    assert resumed["after"] != resumed["digests"]
    assert sorted(path.name for path in (work / "saved").iterdir()) == [
        *(
            f"{kind}-{rank:05d}-000.safetensors"
            for kind in ("exp_avg", "exp_avg_sq")
            for rank in range(2)
        ),
        "index.json",
        *(f"weights-{rank:05d}-000.safetensors" for rank in range(2)),
    ]


@pytest.mark.parametrize(("ranks", "dp"), [(1, 1), (3, 1), (4, 2)])
def test_other_ranks_load_the_same_bits(work: Path, whole: Report, ranks: int, dp: int) -> None:
    """Weights, moments and the first log-probs; the next gradients are summed in another order."""
    resumed = run(work, f"{ranks}", "resume", ranks=ranks, dp=dp)
    assert resumed["digests"] == whole["digests"]
    assert resumed["logprobs"] == whole["logprobs"]
    assert resumed["resume_differences"] == []
