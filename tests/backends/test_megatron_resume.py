"""Runs with a trainer of Megatron-core that are killed: they go on to the same bits."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from spmd_rl.controller.run.checksums import checksum
from tests.dist.recipes.forked_run import ForkedRun
from tests.dist.recipes.test_resume import CUT, KEEP_ALL, beside
from tests.system import chaos_processes as processes
from tests.system.kill_resume import SMALL, Moment, Outcome, differences

pytestmark = [pytest.mark.dist, pytest.mark.backends]
pytest.importorskip("megatron.core", reason="make test-backends installs megatron-core")

MEGATRON = ("grpo", *SMALL, KEEP_ALL, "--trainer.backend.kind=megatron", "--run.exact=false")
SHARDED = ("--nproc=4", "--split.train.dp=2", "--split.train.pp=2", "--trainer.minibatches=2")
CUT_IN_TWO = ("--nproc=2", "--split.train.tp=2")


def undisturbed(folder: Path, model: Path, *words: str) -> ForkedRun:
    run = ForkedRun(folder, [*MEGATRON, f"--model={model}", *words], name="whole")
    losses = {row["train/loss"] for row in run.finish().metrics}
    assert len(losses) == 5, "nothing was learned, so nothing can be lost"
    return run


def check_goes_on(run: ForkedRun, expected: Outcome) -> None:
    assert differences(expected, run.finish()) == []
    assert "resuming at step" in run.output
    assert "bit for bit" not in run.output


@pytest.fixture(scope="module")
def sharded(two_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> ForkedRun:
    return undisturbed(tmp_path_factory.mktemp("sharded"), two_layers, *SHARDED)


def test_a_run_that_is_killed_while_it_saves(sharded: ForkedRun) -> None:
    """On two stages, of which each has its optimizer's state on two ranks."""
    run = beside(sharded, "killed")
    assert run.kill(Moment(1, 0, within="step_000003")), run.output
    check_goes_on(run, Outcome.of(sharded.folder))


def test_lost_moments_show(sharded: ForkedRun) -> None:
    run = beside(sharded, "no-moments", until=CUT)
    folder = run.folder / f"checkpoints/step_{CUT:06d}/trainer"
    index = json.loads((folder / "index.json").read_text())
    for file in folder.glob("exp_avg-*"):
        content = file.read_bytes()
        header = 8 + int.from_bytes(content[:8], "little")
        file.write_bytes(content[:header] + bytes(len(content) - header))
        index["files"][file.name] = checksum(file)
    (folder / "index.json").write_text(json.dumps(index))
    assert run.finish().weights != Outcome.of(sharded.folder).weights
    assert "resuming at step" in run.output


def test_a_run_that_loses_a_rank(two_layers: Path, tmp_path: Path) -> None:
    """One of two ranks that share each matrix is killed."""
    whole = undisturbed(tmp_path, two_layers, *CUT_IN_TWO)
    run = beside(whole, "killed")

    def kill_one(launcher: int, mark: str) -> None:
        os.kill(processes.ranks(mark, launcher)[1], signal.SIGKILL)

    assert run.meet(Moment(1, 1, within="step_000003"), kill_one) != 0
    assert "SIGKILL" in run.output
    check_goes_on(run, Outcome.of(whole.folder))
