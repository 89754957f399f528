"""The same command goes on to the same bits, killed at any moment or stopped at a boundary; and
what it says where not.

`python -m tests.system.kill_resume` is the long form.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.recipes.forked_run import ForkedRun
from tests.system.kill_resume import MODES, SMALL, Moment, Outcome, Run, differences

pytestmark = pytest.mark.dist

KEEP_ALL = "--run.keep_checkpoints=9"
CUT = 2  # the step of the checkpoint that runs go on from, when they are stopped at a boundary


@pytest.fixture(scope="module")
def sync(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """On-policy on two ranks, which share both roles; nobody disturbed it."""
    return undisturbed("sharded", tmp_path_factory)


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One step ahead, a rank for each role; nobody disturbed it."""
    return undisturbed("async", tmp_path_factory)


def undisturbed(mode: str, folders: pytest.TempPathFactory) -> Run:
    run = ForkedRun(folders.mktemp(mode), [*MODES[mode], *SMALL, KEEP_ALL], name="whole")
    run.finish()
    return run


def beside(run: Run, name: str, *, until: int | None = None) -> Run:
    """The same command in another folder: empty, or like the first one's when checkpoint `until`
    was its newest.
    """
    other = ForkedRun(run.cwd, run.words, name=name)
    if until is not None:
        shutil.copytree(run.folder, other.folder)
        shutil.rmtree(other.folder / "hf")
        config = other.folder / "config.toml"
        config.write_text(config.read_text().replace('"whole"', f'"{name}"'))
        for step in range(until + 1, 6):
            shutil.rmtree(other.folder / f"checkpoints/step_{step:06d}")
    return other


@pytest.mark.system
@pytest.mark.parametrize("mode", ["sync", "ahead"])
def test_killed_at_a_random_moment(request: pytest.FixtureRequest, mode: str) -> None:
    whole = request.getfixturevalue(mode)
    rng = random.Random(mode)
    expected, run = Outcome.of(whole.folder), beside(whole, "killed")
    assert len({row["train/loss"] for row in expected.metrics}) == 5, (
        "nothing was learned, so nothing can be lost"
    )
    checkpoint = f"step_{rng.randint(1, 3):06d}"  # while it is written, or soon after
    assert run.kill(Moment(1, rng.randint(0, 40), within=checkpoint)), run.output
    assert differences(expected, run.finish()) == []
    assert "bit for bit" not in run.output


def test_a_lost_cursor_shows(sync: Run) -> None:
    run = beside(sync, "no-cursor", until=CUT)
    state = run.folder / f"checkpoints/step_{CUT:06d}/state.json"
    record = json.loads(state.read_text())
    record["states"]["prompts"]["drawn"] = 0
    state.write_text(json.dumps(record))
    assert run.finish().weights != Outcome.of(sync.folder).weights
    assert f"resuming at step {CUT + 1} from " in run.output


def test_lost_rollouts_show(ahead: Run) -> None:
    """Without the samples that were in flight, step 3 learns from others, of newer weights."""
    run = beside(ahead, "no-rollouts", until=CUT)
    checkpoint = run.folder / f"checkpoints/step_{CUT:06d}"
    (checkpoint / "ahead/values.msgpack").write_bytes(b"\x90")  # an empty list
    with pytest.raises(AssertionError, match=r"ahead/values.msgpack is not as it was written"):
        run.finish()
    state = checkpoint / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"checksums": {}}))
    lost, expected = run.finish(), Outcome.of(ahead.folder)
    assert lost.weights != expected.weights
    assert [row["version/lag_max"] for row in expected.metrics] == [0, 1, 1, 1, 1]
    assert [row["version/lag_max"] for row in lost.metrics] == [0, 1, 0, 1, 1]


def test_two_ranks_then_one(sync: Run) -> None:
    """A sharded checkpoint loads on another number of ranks, and the run says what it cannot
    promise then.
    """
    run = beside(sync, "one-rank", until=CUT)
    one = ForkedRun(run.cwd, [*run.words, "--nproc=1"], name=run.name)
    steps, expected = one.finish().metrics, Outcome.of(sync.folder).metrics
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5]
    assert steps[:CUT] == expected[:CUT]
    assert steps[CUT]["reward/mean"] == expected[CUT]["reward/mean"], (
        "the weights are the same, only sums change"
    )
    assert (
        ": not bit for bit as it would have gone on (trainer from fsdp=2 to one rank)" in one.output
    )


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may outgrow 256 KiB, and those of weights and moments are larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
def test_a_disk_that_takes_no_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, [*MODES["sync"], *SMALL])
    with pytest.raises(
        AssertionError,
        match=r"cannot save \S*runs/r/checkpoints/step_\d+/trainer: rank 0 .*MiB are free",
    ):
        run.finish()
    assert not list(run.folder.rglob("*.safetensors")), "a torn checkpoint takes no room"
