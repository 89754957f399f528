"""A run that is ended from outside saves first, and one whose rank dies starts again by itself:
both go on exactly.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.dist.recipes.forked_run import ForkedRun
from tests.system import chaos_processes as processes
from tests.system.kill_resume import (
    COMMAND,
    MODES,
    REPO,
    SMALL,
    Fault,
    Moment,
    Outcome,
    Run,
    differences,
)
from tests.terminal import screen

pytestmark = pytest.mark.dist

TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--nproc-per-node=2",
    "--rdzv-backend=c10d",
)
TORCHRUN += ("--rdzv-endpoint=localhost:0", "--max-restarts=1", "-m", "spmd_rl", "run")
LAUNCHERS = ["spmd-rl", pytest.param("torchrun", marks=pytest.mark.system)]
RARELY = "--run.save_every=3"
AT_STEP_2 = Moment(1, 0, within="step_00002.jsonl")
SLOW = """
import time
from dataclasses import dataclass, field
from pathlib import Path

import spmd_rl as rl

@dataclass(frozen=True)
class Config:
    run: rl.RunConfig = field(default_factory=rl.RunConfig)

class Sleeper(rl.Role):
    @rl.collective
    def doze(self) -> None:
        Path("asleep").touch()
        time.sleep(60)

    @rl.collective
    def save(self, folder: str) -> None: ...

    @rl.collective
    def wait_until_saved(self) -> None: ...

    @rl.collective
    def load(self, folder: str) -> None: ...

    @rl.local
    def resume_differences(self) -> list[str]:
        return []

def main(ctl, cfg):
    sleeper = ctl.spawn(Sleeper, cfg, on=ctl.world.split({"sleeper": rl.RoleSplit()}).sleeper)
    for step in ctl.steps(1, ctl.resume(sleeper=sleeper)):
        (ctl.run_folder / "asleep").touch()
        sleeper.doze.call()
"""


def end_launcher(launcher: int, mark: str) -> None:
    os.kill(launcher, signal.SIGTERM)


def kill_rank_1(launcher: int, mark: str) -> None:
    os.kill(processes.ranks(mark, launcher)[1], signal.SIGKILL)


def end_rank_1(launcher: int, mark: str) -> None:
    os.kill(processes.ranks(mark, launcher)[1], signal.SIGTERM)


def kill_controller(launcher: int, mark: str) -> None:
    os.kill(processes.controller(mark) or 0, signal.SIGKILL)


def kill_launcher(launcher: int, mark: str) -> None:
    os.kill(launcher, signal.SIGKILL)
    processes.wait_for_end(mark, 60)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What a run leaves that nobody disturbed."""
    words = [*MODES["sharded"], *SMALL, "--steps=8", RARELY]
    return ForkedRun(tmp_path_factory.mktemp("whole"), words).finish()


GATED = """
import fcntl

def even(prompt, sample):
    if prompt.uid >= FIRST:
        with open("gate") as gate:
            fcntl.flock(gate, fcntl.LOCK_SH)
    return float((sample.tokens % 2 == 0).mean())
"""


def strike(run: Run, moment: Moment, fault: Fault, *, before_step: int) -> int:
    """Start the run, let `fault` strike at `moment`, and return the exit code.

    The rewards of step `before_step` wait for the fault, so that none comes too late.
    """
    first = str(4 * (before_step - 1))  # the uid of the step's first prompt
    (run.cwd / "gated.py").write_text(GATED.replace("FIRST", first))
    run.words += [f"--reward={run.cwd / 'gated.py'}:even", "--hooks.deadline_s=0"]
    with (run.cwd / "gate").open("w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)

        def strike_and_open(launcher: int, mark: str) -> None:
            fault(launcher, mark)
            fcntl.flock(gate, fcntl.LOCK_UN)

        return run.meet(moment, strike_and_open)


def disturbed(folder: Path, launcher: str, *words: str) -> Run:
    words = (*MODES["sharded"], *SMALL, "--steps=8", RARELY, *words)
    run = ForkedRun(folder, [*words], look_s=0.02)
    if launcher == "torchrun":
        run.command = TORCHRUN
        run.words.remove("--nproc=2")  # torchrun takes it for a short form of its own option
    return run


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_sigterm_saves_and_the_same_command_goes_on(
    tmp_path: Path, whole: Outcome, launcher: str
) -> None:
    run = disturbed(tmp_path, launcher)
    code = strike(run, AT_STEP_2, end_launcher, before_step=4)
    assert code == (143 if launcher == "spmd-rl" else 1), run.output
    last = len((run.folder / "metrics.jsonl").read_text().splitlines())
    assert (
        f"the run was ended from outside: every rank got SIGTERM; saved after step {last}, the same"
        in run.output
    )
    assert last < 8
    assert differences(whole, run.finish()) == []
    assert f"resuming at step {last + 1} from " in run.output


def test_sigterm_to_one_rank_saves_too(tmp_path: Path) -> None:
    # it is known after seconds
    run = disturbed(tmp_path, "spmd-rl", "--steps=500", "--trainer.total_steps=1000")
    assert run.meet(AT_STEP_2, end_rank_1) == 143, run.output
    last = len((run.folder / "metrics.jsonl").read_text().splitlines())
    assert re.search(
        rf"outside: rank 1 \(.*\) got SIGTERM; saved after step {last}, the same command goes on",
        run.output,
    )


@pytest.mark.parametrize(
    ("disturb", "sentence"),
    [
        (kill_controller, r"the controller \(pid \d+\) was killed by SIGKILL"),
        (kill_launcher, r"rank \d \(host \S+, pid \d+\) lost its launcher \(pid \d+\)[^;]*"),
    ],
)
def test_a_kill_of_who_is_no_rank_says_where_it_goes_on(
    tmp_path: Path, disturb: Fault, sentence: str
) -> None:
    run = disturbed(tmp_path, "spmd-rl")
    assert strike(run, Moment(1, 0, within="step_000006"), disturb, before_step=8) != 0
    assert re.search(
        sentence + r"; the same command goes on after step [36]$", run.output, re.MULTILINE
    ), run.output


def test_sigterm_in_a_step_that_is_too_long(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    run = Run(tmp_path, ["slow.py", "--nproc=2", "--run.grace_s=1"], look_s=0.02)
    assert run.meet(Moment(1, 0, within="asleep"), end_launcher) == 143, run.output
    assert run.output.rstrip().endswith(
        "every rank got SIGTERM; step 1 did not end within 1 s and is lost"
    )


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_rank_starts_the_world_again(
    tmp_path: Path, whole: Outcome, launcher: str
) -> None:
    run = disturbed(tmp_path, launcher, *(["--max-restarts=1"] if launcher == "spmd-rl" else []))
    code = strike(run, Moment(1, 0, within="step_000006"), kill_rank_1, before_step=8)
    assert code == 0, run.output
    assert "start 2 of the ranks: lost rank 1 (" in run.output
    assert "resuming at step 4 from " in run.output or "resuming at step 7 from " in run.output
    assert differences(whole, Outcome.of(run.folder)) == []


def test_restarts_are_used_up(tmp_path: Path) -> None:
    """The last start's sentence is the run's."""
    (tmp_path / "bad.py").write_text("def grade(prompt, sample):\n    raise ValueError('always')\n")
    run = disturbed(
        tmp_path, "spmd-rl", "--max-restarts=1", f"--reward={tmp_path / 'bad.py'}:grade"
    )
    assert run.meet(Moment(99, 0), lambda launcher, mark: None) == 2
    assert run.output.count("raised ValueError: always") == 2, run.output
    assert "start 2 of the ranks: " in run.output


def in_a_terminal(
    folder: Path, words: list[str], until: Path, *, shown: bytes = b"", again: bytes | None = None
) -> tuple[int, str]:
    """Run `spmd-rl` on a terminal of 80 columns, type Ctrl-C once `until` is there and `shown` was
    written, and once more after `again`; its exit code and all it wrote.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ |= {
            "PYTHONPATH": str(REPO),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "80",
            "LINES": "40",
            "TERM": "xterm",
        }
        os.execv(COMMAND[0], [*COMMAND, *words])
    written, typed, give_up_at = b"", False, time.monotonic() + 1000
    try:
        while time.monotonic() < give_up_at:
            if select.select([terminal], [], [], 0.05)[0]:
                try:
                    written += os.read(terminal, 1 << 16)
                except OSError:  # nobody holds the other end any more
                    break
            if not typed and until.exists() and shown in written:
                os.write(terminal, b"\x03")
                typed = True
            if again is not None and typed and again in written:
                os.write(terminal, b"\x03")
                again = None
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), written.decode()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.close(terminal)


def test_ctrl_c_leaves_the_last_words_on_the_terminal(tmp_path: Path) -> None:
    words = [*MODES["sharded"], *SMALL, "--steps=500", "--trainer.total_steps=2000", "--run.name=r"]
    until = tmp_path / "runs/r/checkpoints/step_000002/state.json"
    code, written = in_a_terminal(tmp_path, words, until, shown=b"step time")
    lines = screen(written, 80)
    assert code == 130, written
    begins = [number for number, line in enumerate(lines) if line.startswith("the run was ended")]
    assert begins, written
    last = "".join(lines[begins[0] :])
    assert re.fullmatch(
        r"the run was ended from outside: every rank got SIGINT; "
        r"saved after step (\d+), the same command goes on",
        last,
    )
    assert sum("runs/r" in line and "╭" in line for line in lines) == 1, (
        "one frame, and no torn one above it"
    )
    assert "^C" in written


def test_a_second_ctrl_c_waits_for_no_step(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    words = ["slow.py", "--nproc=2", "--run.grace_s=500"]
    code, written = in_a_terminal(tmp_path, words, tmp_path / "asleep", again=b"a second Ctrl-C")
    assert code == 130, written
    last = written.splitlines()[-1].removeprefix("\x1b[?25h")  # which shows the cursor again
    assert last == "the run was ended from outside: every rank got SIGINT", written
