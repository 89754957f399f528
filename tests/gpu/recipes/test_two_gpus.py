"""Two GPUs: whole runs on every split, resumed on fewer ranks, and a collective that one of them
does not come to.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.grpo_proof import broken_promises
from spmd_rl.mesh.world import COLLECTIVE_TIMEOUT
from tests.gpu.recipes.runs import ONE_GPU, TWO_GPUS, new_run, proof, together
from tests.system.kill_resume import Moment, Outcome, Run, differences

pytestmark = pytest.mark.timeout(400)

HANG = str(Path(__file__).with_name("hang.py"))
LIMITS = {"sleep": "--run.deadline_s=8", "stop": "--run.lost_after_s=8"}
DEADLINE_S, END_S = 8.0, 60.0  # the host may be busy
CUT = 2


class Hang:
    """A run whose last rank stays away, and how long it went on after that, in seconds."""

    def __init__(self, folder: Path, how: str) -> None:
        self.run = Run(folder, [HANG, f"--how={how}", "--nproc=2", LIMITS[how]], name=how)
        assert self.run.start() == 1, self.run.output
        self.seconds = time.time() - (folder / f"{how}.alone").stat().st_mtime

    def stacks(self, rank: int) -> str:
        return (self.run.folder / f"stacks/rank_{rank}.txt").read_text()

    def sums(self, rank: int) -> list[dict[str, Any]]:
        """The sums on GPUs that a rank has entered, as NCCL's flight record has them."""
        record = json.loads((self.run.folder / f"stacks/rank_{rank}.collectives.json").read_text())
        return [
            entry
            for entry in record["nccl"]["entries"]
            if entry["profiling_name"] == "nccl:all_reduce"
        ]


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, Any]:
    """Everything at once: what the tests below look at."""
    modes = {**TWO_GPUS, "alone": ONE_GPU["sync"]}
    runs = {
        mode: new_run(folder, mode, words, "--run.keep_checkpoints=9")
        for mode, words in modes.items()
    }
    tasks: dict[str, Callable[[], Any]] = {name: run.finish for name, run in runs.items()}
    tasks |= {how: partial(Hang, folder, how) for how in LIMITS}
    found = together(tasks)
    return {**found, "runs": runs} | together(
        {
            "killed": lambda: killed(folder, runs["sharded"].num_events),
            "fewer": lambda: on_one_rank(runs["sharded"]),
        }
    )


def killed(folder: Path, num_events: int) -> Run:
    run = new_run(folder, "killed", TWO_GPUS["sharded"], "--run.keep_checkpoints=9")
    assert run.kill(Moment.random(random.Random(2), num_events // 2)), run.output
    run.finish()
    return run


def on_one_rank(sharded: Run) -> Run:
    """A run that two ranks began, gone on with by one from step `CUT`."""
    one = Run(sharded.cwd, [*sharded.words, "--nproc=1"], name="fewer")
    shutil.copytree(sharded.folder, one.folder)
    shutil.rmtree(one.folder / "hf")
    config = one.folder / "config.toml"
    config.write_text(config.read_text().replace('"sharded"', '"fewer"'))
    for step in range(CUT + 1, 6):
        shutil.rmtree(one.folder / f"checkpoints/step_{step:06d}")
    one.finish()
    return one


@pytest.mark.parametrize("mode", [*TWO_GPUS, "alone"])
def test_no_token_is_unequal(done: dict[str, Any], mode: str) -> None:
    assert broken_promises(done["runs"][mode].folder) == []
    for step, (compared, mismatched) in enumerate(proof(done["runs"][mode])):
        assert mismatched == 0
        assert compared > 1000 or (mode == "async" and step > 0), (
            "one step ahead, tokens are of the weights before"
        )


def test_a_rank_for_each_role_gives_what_one_rank_gives(done: dict[str, Any]) -> None:
    assert differences(done["alone"], done["split"]) == []


def test_one_step_ahead_gives_something_else(done: dict[str, Any]) -> None:
    """The negative control."""
    assert done["async"].weights != done["alone"].weights


def test_killed_with_sharded_weights(done: dict[str, Any]) -> None:
    assert differences(done["sharded"], Outcome.of(done["killed"].folder)) == []


def test_two_ranks_then_one(done: dict[str, Any]) -> None:
    run: Run = done["fewer"]
    assert (
        ": not bit for bit as it would have gone on (trainer from fsdp=2 to one rank)" in run.output
    )
    assert [mismatched for _, mismatched in proof(run)] == [0] * 5
    steps, expected = Outcome.of(run.folder).metrics, done["sharded"].metrics
    assert steps[CUT]["reward/mean"] == expected[CUT]["reward/mean"], (
        "the weights are the same, only sums change"
    )


@pytest.mark.parametrize("how", list(LIMITS))
def test_a_rank_that_stays_away_from_a_collective(done: dict[str, Any], how: str) -> None:
    hang: Hang = done[how]
    sentence = hang.run.output.strip().splitlines()[-1]
    assert hang.seconds < DEADLINE_S + END_S
    if how == "sleep":
        assert "no answer from rank 0 (host " in sentence
        assert ", rank 1 (host " in sentence
        assert (
            " in sum_twice, in actor.sum_twice (phase train) after 8.0 s; the stacks of all ranks"
            in sentence
        )
        assert "threading.Event().wait()" in hang.stacks(1)
        assert len(hang.sums(1)) == 1
    else:
        assert "lost rank 1 (host " in sentence
        assert "in actor.sum_twice (phase train) after" in sentence
        assert "no answer" in hang.stacks(1)
    assert "in _sum" in hang.stacks(0)
    entered = hang.sums(0)
    assert len(entered) == 2, "rank 0 is in a sum that rank 1 never entered"
    assert [entry["state"] == "completed" for entry in entered] == [True, False]
    assert entered[1]["timeout_ms"] == COLLECTIVE_TIMEOUT.total_seconds() * 1000, (
        "NCCL does not end whoever waits"
    )
