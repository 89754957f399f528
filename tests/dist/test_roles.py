"""A policy, its critic and a frozen model on one, two, three and four gloo ranks."""

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
    return write_model_folder(tmp_path_factory.mktemp("roles"))


@pytest.fixture(scope="module")
def one_rank(work: Path) -> Report:
    return run(work, ranks=1, dp=1)


def run(work: Path, ranks: int, dp: int) -> Report:
    out, folder = work / f"{ranks}.json", work / f"saved_{ranks}"
    return torchrun("roles_ranks.py", ranks, out, str(work), str(dp), str(out), str(folder))


def check(report: Report) -> None:
    policy, frozen = report["before"]
    assert policy == frozen
    new_policy, pushed = report["pushed"]
    assert new_policy == pushed != policy
    assert report["whole"] == report["resumed"], "a resumed run has the same bits"
    assert report["whole"]["policy"] != report["whole"]["frozen"], "a step moves the policy alone"
    assert report["rewards"]


def test_one_rank(one_rank: Report) -> None:
    check(one_rank)


@pytest.mark.parametrize(("ranks", "dp"), [(2, 1), (3, 1), (4, 2)])
def test_several_ranks(work: Path, one_rank: Report, ranks: int, dp: int) -> None:
    report = run(work, ranks, dp)
    check(report)
    assert report["before"] == one_rank["before"], "forward passes do not depend on ranks"
    assert report["few"]["train/loss"] == pytest.approx(one_rank["few"]["train/loss"], rel=1e-3)
    assert len(report["top"]) == 2
