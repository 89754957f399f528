"""A trainer of Megatron-core that sleeps while its engine generates, on gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.backends.megatron_case import write_model
from tests.dist.recipes.conftest import Run
from tests.dist.recipes.test_loops import drawn
from tests.dist.recipes.test_sleep import same_run
from tests.dist.torchrun import torchrun

pytestmark = [pytest.mark.dist, pytest.mark.backends]
pytest.importorskip("megatron.core", reason="make test-backends installs megatron-core")

MEGATRON = ("--trainer.backend.kind=megatron", "--run.exact=false")


def test_a_run_that_sleeps_has_the_same_weights_and_samples(run: Run, two_layers: Path) -> None:
    """On two stages, which hold different bytes."""
    words = (*MEGATRON, f"--model={two_layers}", "--split.train.pp=2")
    asleep, awake = same_run(run, "grpo", *words, nproc=2)
    assert "roles sleep in turn: offload.sleep = always" in asleep.output
    assert all(row["time/sleep"] > 0 and row["time/wake"] > 0 for row in asleep.metrics)
    assert not any("time/sleep" in row for row in awake.metrics)
    first, *_, last = drawn(asleep, 3)
    assert first != last


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the ranks of two trainers saw, one after the other: dp 2, and tp 2."""
    work = tmp_path_factory.mktemp("sleep")
    model = write_model(work / "model", "qwen3")
    out = work / "out.json"
    return torchrun("sleep_ranks.py", 2, out, str(model), str(out), room="backends")["ranks"]


def test_memory_that_sleeps_is_freed(reports: list[dict[str, Any]]) -> None:
    """All of it, tag by tag: weights with masters and gradients, and moments."""
    for report in reports:
        for case in report.values():
            assert min(case["own_bytes"].values()) > 0
            assert case["slept_bytes"] == {"master": 0, "moments": 0}
            assert case["left_storage_bytes"] == {"master": 0, "moments": 0}
            assert case["all_have_one"]
            assert case["awake_moments"] == 0, "they sleep alone too"


def test_memory_that_wakes_is_where_it_was(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        for case in report.values():
            assert case["equal_scores"]
            assert case["equal_weights"]
            assert case["learned"]


def test_a_call_that_needs_what_sleeps_is_refused(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        for case in report.values():
            assert "needs memory 'master' of train" in case["refused"]["score"]
            assert "needs memory 'moments' of train" in case["refused"]["save"]
            assert "a push needs memory 'master' of train" in case["refused"]["push"]
