"""Training on 1, 2 and 4 gloo ranks, sharded and replicated: the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.dist.torchrun import torchrun
from tests.dist.train_case import make_batch, write_model_folder

pytestmark = pytest.mark.dist

Report = dict[str, Any]
SAME = (
    "train/loss",
    "train/grad_norm",
    "train/entropy",
    "train/clip_frac",
    "train/lr",
    "onpolicy/k3",
)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def alone(work: Path) -> Report:
    return torchrun("train_ranks.py", 1, work / "1.json", str(work), "1", str(work / "1.json"))


@pytest.fixture(scope="module")
def sharded(work: Path, alone: Report) -> Report:
    """Two ranks; resumes what one rank saved."""
    return torchrun(
        "train_ranks.py",
        2,
        work / "2.json",
        str(work),
        "1",
        str(work / "2.json"),
        str(work / "1.ckpt"),
    )


@pytest.fixture(scope="module")
def hybrid(work: Path, sharded: Report) -> Report:
    """Two replicas of two shards; resumes what two ranks saved."""
    return torchrun(
        "train_ranks.py",
        4,
        work / "4.json",
        str(work),
        "2",
        str(work / "4.json"),
        str(work / "2.ckpt"),
    )


@pytest.fixture(params=["sharded", "hybrid"])
def report(request: pytest.FixtureRequest) -> Report:
    return request.getfixturevalue(request.param)


def test_metrics_do_not_depend_on_the_ranks(alone: Report, report: Report) -> None:
    for step, expected in zip(report["steps"], alone["steps"], strict=True):
        for name in SAME:
            assert step[name] == pytest.approx(expected[name], rel=2e-5, abs=1e-7), name
        assert step["onpolicy/compared_tokens"] == expected["onpolicy/compared_tokens"]
    first_loss = [one["steps"][0]["train/loss"] for one in (alone, report)]
    assert first_loss[0] == pytest.approx(first_loss[1], rel=1e-13)
    assert alone["steps"][0]["onpolicy/compared_tokens"] == make_batch(0).mask.sum()


def test_weights_do_not_depend_on_the_ranks(alone: Report, report: Report) -> None:
    for name, values in alone["weights"].items():
        np.testing.assert_allclose(
            report["weights"][name], values, rtol=1e-4, atol=2e-5, err_msg=name
        )


def test_a_step_that_fails_in_a_later_micro_batch_leaves_no_gradients(report: Report) -> None:
    before, after = report["around_failure"]
    assert after == pytest.approx(before, rel=1e-6)


def test_a_pass_that_failed_leaves_no_gathered_weights(report: Report) -> None:
    first, second = report["after_broken_pass"]
    for after, expected in (first, second):
        assert after == expected
    assert first[1] != second[1]


def test_wrapping_layers_and_recomputing_them_changes_nothing(report: Report) -> None:
    for step, expected in zip(report["layers"], report["steps"], strict=True):
        for name in SAME:
            assert step[name] == pytest.approx(expected[name], rel=2e-5, abs=1e-7), name


def test_a_small_model_is_gathered_and_reduced_once_a_step(report: Report) -> None:
    num_micros, num_collectives = report["collectives"]
    assert num_micros > 1
    assert num_collectives == [1, 1]


def test_sums_in_rank_order_are_those_of_two_ranks(sharded: Report) -> None:
    """The sum of two gradients does not depend on which rank adds them."""
    for step, expected in zip(sharded["deterministic"], sharded["steps"], strict=True):
        assert {name: step[name] for name in SAME} == {name: expected[name] for name in SAME}


def test_ranks_without_a_sequence_take_part(alone: Report, report: Report) -> None:
    for name in SAME:
        assert report["few"][name] == pytest.approx(alone["few"][name], rel=1e-3, abs=1e-5), name


def test_gradients_of_entropy_and_candidates_do_not_depend_on_the_ranks(
    alone: Report, report: Report
) -> None:
    """In the second step, some of four ranks have no token to score."""
    for step, expected in zip(report["all_scores"], alone["all_scores"], strict=True):
        for name in ("train/loss", "train/grad_norm", "train/entropy"):
            assert step[name] == pytest.approx(expected[name], rel=1e-4), name


def test_a_nan_on_one_rank_is_named_by_all_and_moves_nothing(report: Report) -> None:
    last = len(report["poisoned"]) - 1
    sentence = (
        f"train step 4: the loss is not finite on rank {last}; that optimizer step was not taken"
    )
    assert report["poisoned"] == [sentence] * (last + 1)


def test_a_checkpoint_resumes_on_another_number_of_ranks(sharded: Report, hybrid: Report) -> None:
    """One rank's checkpoint on two, two ranks' on four; the steps after it are the same ones."""
    for name in SAME:
        for step, expected in zip(hybrid["resumed"], sharded["resumed"], strict=True):
            assert step[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
    assert sharded["resumed_version"] == hybrid["resumed_version"] == 3


def test_an_export_holds_the_gathered_weights(report: Report, work: Path) -> None:
    folder = work / f"{len(report['poisoned'])}.hf"
    for name, one in load_file(folder / "model.safetensors").items():
        np.testing.assert_array_equal(one.flatten(), np.array(report["exported"][name], np.float32))
