"""Optimizers and frozen parameters on one to four gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dist.optimizer_ranks import FREEZES
from tests.dist.torchrun import torchrun
from tests.dist.train_case import write_model_folder

pytestmark = pytest.mark.dist

Report = dict[str, Any]
SAME = ("train/loss", "train/grad_norm", "train/entropy", "train/lr")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("optimizers"))


def run(work: Path, num_ranks: int, dp: int, *more: str) -> Report:
    out = work / f"{num_ranks}.json"
    words = (str(work), str(dp), str(out), str(work / f"saved{num_ranks}"), *more)
    return torchrun("optimizer_ranks.py", num_ranks, out, *words)


@pytest.fixture(scope="module")
def alone(work: Path) -> Report:
    return run(work, 1, 1)


@pytest.fixture(scope="module", params=[(2, 1), (3, 1), (4, 2)], ids=str)
def report(work: Path, alone: Report, request: pytest.FixtureRequest) -> Report:
    """Also four ranks as two replicas of two shards. They load what one rank saved."""
    return run(work, *request.param, str(work / "saved1"))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_same_gradients_give_the_same_bits(alone: Report, report: Report, kind: str) -> None:
    assert report[kind]["digests"] == alone[kind]["digests"]
    assert alone["muon"]["digests"] != alone["adamw"]["digests"]


def test_moments_take_what_is_planned(alone: Report) -> None:
    """On one rank; on more the plan spreads rows evenly, which chunks of few rows are not."""
    for kind in ("adamw", "muon"):
        assert alone[kind]["bytes"] == alone[kind]["planned"]
    assert alone["muon"]["bytes"] < 0.75 * alone["adamw"]["bytes"]


@pytest.mark.parametrize("case", [*FREEZES, "trained"])
def test_training_does_not_depend_on_the_ranks(alone: Report, report: Report, case: str) -> None:
    """With Muon ("trained"), bfloat16 in its iteration makes more of a difference in the sums."""
    tolerance = {"rtol": 2e-2, "atol": 1e-3} if case == "trained" else {"rtol": 1e-4, "atol": 2e-5}
    for step, expected in zip(report[case]["steps"], alone[case]["steps"], strict=True):
        for name in SAME:
            assert step[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
    for name, values in alone[case]["weights"].items():
        np.testing.assert_allclose(report[case]["weights"][name], values, err_msg=name, **tolerance)


def test_muon_resumes_bit_for_bit(alone: Report, report: Report) -> None:
    for one in (alone, report):
        assert (one["loaded"], one["resumed"], one["differences"]) == (True, True, [])


def test_other_ranks_load_the_same_bits(alone: Report, report: Report) -> None:
    assert report["of_others"] == alone["saved"]


def test_a_checkpoint_of_another_optimizer_is_refused(report: Report) -> None:
    assert report["refused"].endswith(
        "is of another optimizer: it holds exp_avg, exp_avg_sq, momentum_buffer, weights, "
        "not exp_avg, exp_avg_sq, weights; set trainer.optimizer.kind and trainer.freeze as in the "
        "run that wrote it"
    )
