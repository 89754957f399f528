"""Runs on one GPU that end in the same bits, whether nobody disturbed them, or they were stopped or
killed.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from benchmarks.grpo_proof import broken_promises
from tests.gpu.recipes.runs import ONE_GPU, new_run, proof, together
from tests.system.kill_resume import Moment, Outcome, Run, differences

pytestmark = pytest.mark.timeout(400)

AT_STEP_2 = Moment(1, 0, within="step_00002.jsonl")


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, Run]:
    """Each mode undisturbed, the first once more, and with another seed."""
    runs = {mode: new_run(folder, mode, words) for mode, words in ONE_GPU.items()}
    runs["again"] = new_run(folder, "again", ONE_GPU["sync"])
    runs["other seed"] = new_run(folder, "seed", ONE_GPU["sync"], "--run.seed=1")
    together({name: run.finish for name, run in runs.items()})
    return runs


def end_launcher(launcher: int, mark: str) -> None:
    os.kill(launcher, signal.SIGTERM)


def stopped(folder: Path, mode: str) -> Run:
    """Saved at a boundary by a SIGTERM, and gone on with by the same command."""
    run = new_run(folder, f"{mode}-stopped", ONE_GPU[mode])
    assert run.meet(AT_STEP_2, end_launcher) == 143, run.output
    run.finish()
    return run


def killed(folder: Path, mode: str, num_events: int) -> Run:
    """Killed at a random moment, and gone on with by the same command."""
    run = new_run(folder, f"{mode}-killed", ONE_GPU[mode])
    assert run.kill(Moment.random(random.Random(mode), num_events // 2)), run.output
    run.finish()
    return run


@pytest.fixture(scope="module")
def disturbed(folder: Path, whole: dict[str, Run]) -> dict[str, Run]:
    """All of them, at once."""
    tasks = {}
    for mode in ONE_GPU:
        tasks[f"{mode} stopped"] = lambda mode=mode: stopped(folder, mode)
        tasks[f"{mode} killed"] = lambda mode=mode: killed(folder, mode, whole[mode].num_events)
    return together(tasks)


@pytest.mark.parametrize("mode", list(ONE_GPU))
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_goes_on_bit_for_bit(
    whole: dict[str, Run], disturbed: dict[str, Run], mode: str, how: str
) -> None:
    expected, run = Outcome.of(whole[mode].folder), disturbed[f"{mode} {how}"]
    assert len({row["train/loss"] for row in expected.metrics}) == 5, (
        "nothing was learned, so nothing can be lost"
    )
    assert differences(expected, Outcome.of(run.folder)) == []
    if how == "stopped":
        assert "resuming at step" in run.output
    assert "bit for bit" not in run.output


def test_the_same_command_twice(whole: dict[str, Run]) -> None:
    assert differences(Outcome.of(whole["sync"].folder), Outcome.of(whole["again"].folder)) == []


def test_another_seed_ends_elsewhere(whole: dict[str, Run]) -> None:
    """The negative control."""
    assert (
        Outcome.of(whole["other seed"].folder).weights != Outcome.of(whole["sync"].folder).weights
    )


def test_no_token_is_unequal(whole: dict[str, Run]) -> None:
    for compared, mismatched in proof(whole["sync"]):
        assert compared > 1000
        assert mismatched == 0


@pytest.mark.parametrize("mode", list(ONE_GPU))
def test_what_the_machine_chose_promises_equal_bits(whole: dict[str, Run], mode: str) -> None:
    assert broken_promises(whole[mode].folder) == []
    assert "not promised" not in whole[mode].output
