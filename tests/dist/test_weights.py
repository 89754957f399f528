"""Weight pushes over real gloo ranks: split, colocated and mixed, to engines of either dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec
from tests.dist.torchrun import torchrun
from tests.dist.train_case import write_model_folder

pytestmark = pytest.mark.dist

Report = dict[str, Any]
TWO_RANKS = ("0-0/1-1", "all/all", "0-0/all")
FOUR_RANKS = ("0-1/all", "0-2/3-3")
CHANGED = "model.embed_tokens.weight"
CASES = [
    f"{split} {dtype}" for split in (*TWO_RANKS, *FOUR_RANKS) for dtype in ("float32", "bfloat16")
]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def reports(work: Path) -> Report:
    two = torchrun(
        "weights_ranks.py", 2, work / "2.json", str(work), str(work / "2.json"), *TWO_RANKS
    )
    return two | torchrun(
        "weights_ranks.py", 4, work / "4.json", str(work), str(work / "4.json"), *FOUR_RANKS
    )


@pytest.fixture(params=CASES)
def report(request: pytest.FixtureRequest, reports: Report) -> Report:
    return reports[request.param] | {
        "split": request.param.split()[0],
        "dtype": request.param.split()[1],
    }


def _model_bytes(work: Path, dtype: str) -> int:
    with torch.device("meta"):
        return (
            sum(one.numel() for one in CausalLM(read_spec(work)).parameters())
            * getattr(torch, dtype).itemsize
        )


def test_all_ranks_make_the_same_plan(report: Report) -> None:
    assert len(set(report["plans"])) == 1


def test_each_push_brings_the_trainer_s_weights_of_that_step(report: Report) -> None:
    first, second = report["pushes"]
    assert first["equal"]
    assert second["equal"]
    assert not set(first["digests"].values()) & set(second["digests"].values())
    assert report["corruption_seen"]


def test_each_rank_finds_its_push_equal_and_a_changed_element_wrong(report: Report) -> None:
    """The same element is changed on every engine. Where one shares the trainer's memory, that is
    the trainer's value, which all engines then hold.
    """
    num_tensors = len(report["pushes"][0]["digests"])
    engines = {"0-0/1-1": [1], "0-2/3-3": [3], "all/all": [0, 1], "0-0/all": [0, 1]}
    ranks = engines.get(report["split"], [0, 1, 2, 3])
    for push in report["pushes"]:
        for rank, found in enumerate(push["found"]):
            assert found["unequal"] == []
            assert found["equal"] + found["shared"] == (num_tensors if rank in ranks else 0)
    for rank, found in enumerate(report["found_corrupted"]):
        differs = rank in ranks and not report["aliased"][0]
        assert [one[:2] for one in found["unequal"]] == ([[CHANGED, rank]] if differs else [])


def test_traffic_is_what_the_plan_says(report: Report, work: Path) -> None:
    whole = _model_bytes(work, report["dtype"])
    num_engines = {"0-0/1-1": 1, "all/all": 2, "0-0/all": 2, "0-1/all": 4, "0-2/3-3": 1}[
        report["split"]
    ]
    assert report["wire_bytes"] + report["local_bytes"] == num_engines * whole
    for push in report["pushes"]:
        sums = {key: sum(rank[key] for rank in push["traffic"]) for key in push["traffic"][0]}
        assert sums["sent_bytes"] == sums["received_bytes"] == report["wire_bytes"]
        assert sums["aliased_bytes"] + sums["copied_bytes"] == report["local_bytes"]


def test_a_lone_trainer_s_engine_shares_its_memory(reports: Report, work: Path) -> None:
    """One trainer, engines there and on a second rank: the first is aliased, only the second is
    sent to.
    """
    whole = _model_bytes(work, "float32")
    assert reports["0-0/all float32"]["aliased"] == [whole, 0]
    for push in reports["0-0/all float32"]["pushes"]:
        assert push["traffic"][0] == {
            "aliased_bytes": whole,
            "copied_bytes": 0,
            "sent_bytes": whole,
            "received_bytes": 0,
        }
    assert reports["0-0/all bfloat16"]["aliased"] == [0, 0]


def test_engines_hold_the_same_whatever_the_split(reports: Report) -> None:
    """One train rank: split and colocated engines get the same bits."""
    for dtype in ("float32", "bfloat16"):
        split, colocated = (reports[f"{name} {dtype}"]["pushes"] for name in ("0-0/1-1", "0-0/all"))
        assert [push["digests"] for push in split] == [push["digests"] for push in colocated]
