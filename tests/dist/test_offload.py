"""Offload to host memory on several gloo ranks, some with uneven shards: no bit changes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.torchrun import torchrun
from tests.dist.train_case import write_model_folder

pytestmark = pytest.mark.dist

Report = dict[str, Any]
RANKS = {"2 shards": (2, 1), "2 replicas": (2, 2)}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    work = write_model_folder(tmp_path_factory.mktemp("offload"))
    found = {}
    for name, (num_ranks, dp) in RANKS.items():
        out = work / f"{num_ranks}-{dp}.json"
        words = (str(work), str(dp), str(out), str(out.with_suffix(".saved")))
        found[name] = torchrun("offload_ranks.py", num_ranks, out, *words)
    return found


@pytest.mark.parametrize("ranks", RANKS)
def test_weights_and_moments_have_the_same_bits(reports: dict[str, Report], ranks: str) -> None:
    report = reports[ranks]
    assert report["moments"] == report["plain"]
    assert report["resumed"] == report["plain"]


def test_master_weights_of_one_shard_sleep_on_each_replica(reports: dict[str, Report]) -> None:
    assert reports["2 replicas"]["master"] == reports["2 replicas"]["plain"]
    assert reports["2 replicas"]["refused"] == ""


def test_master_weights_of_more_shards_may_not_sleep(reports: dict[str, Report]) -> None:
    assert reports["2 shards"]["refused"] == (
        "trainer.backend.offload = 'master' needs one shard, and there are 2: with more, "
        "weights are gathered from the master weights in each step, so they must be awake; "
        "set it to 'moments'"
    )
