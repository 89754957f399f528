"""Random faults in real runs: each run must complete, or end soon with an error that names it.

    python -m tests.system.chaos --faults 20 --seed 1

Each fault strikes a run of two ranks on this machine. For each it prints the seed, how the run
ended and after how long. With --save the table goes to benchmarks/results/. --only INDEX repeats
one fault.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from benchmarks.ran_files import A_RUN
from benchmarks.record import finish
from benchmarks.table import Row
from tests.system import chaos_processes as processes
from tests.system.chaos_cases import DEADLINE_S, LOST_AFTER_S, Case, cases, matches
from tests.system.faults import ENVIRONMENT

REPO = Path(__file__).parents[2]
GRACE_S = 30.0  # how long after its deadline all processes of a run may take to end
RUN_S = 300.0  # the last resort for a run to complete, from its first step
DISK_BYTES = 4 << 20
FILLER = "filler"
START_S = 600.0  # the last resort for its first step

TIMES = [
    f"--run.deadline_s={DEADLINE_S:g}",
    f"--run.lost_after_s={LOST_AFTER_S:g}",
    "--run.start_s=60",
]
TOY = [str(REPO / "tests/system/chaos_recipe.py"), "--run.save_every=10"]
ARITHMETIC = [
    str(REPO / "examples/arithmetic/recipe.py"),
    f"--config={REPO / 'examples/arithmetic/demo.toml'}",
    f"--model={REPO / 'examples/arithmetic/model'}",
    f"--data={REPO / 'examples/arithmetic/train.jsonl'}",
    f"--warmup_data={REPO / 'examples/arithmetic/warmup.jsonl'}",
    f"--eval.data={REPO / 'examples/arithmetic/eval.jsonl'}",
    f"--reward={REPO / 'examples/arithmetic/reward.py'}:correct",
    *(
        "--run.name=run",
        "--warmup_steps=2",
        "--warmup_pairs=16",
        "--prompts_per_step=8",
        "--steps=400",
        "--trainer.total_steps=500",
    ),
]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: "error", "completed" or "resumed".

    `seconds` is the time from the fault to the end of its last process.
    """

    case: Case
    how: str
    seconds: float
    sentence: str
    problem: str


class Run:
    """One run and its output."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = folder
        recipe = TOY if case.recipe == "toy" else ARITHMETIC
        settings = [
            word.replace("POISON", str(REPO / "tests/system/poison.py")) for word in case.settings
        ]
        environment = {
            **{
                key: value
                for key, value in os.environ.items()
                if not key.startswith(("SPMD_RL", "TORCHELASTIC"))
            },
            "PYTHONPATH": str(REPO),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder),
            processes.MARK: self.mark,
            **({ENVIRONMENT: case.frames.text()} if case.frames else {}),
        }
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.system.chaos_entry",
                "run",
                *recipe,
                "--nproc=2",
                *TIMES,
                *settings,
            ],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started = threading.Event()
        self._said: dict[str, list[str]] = {"out": [], "err": []}
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(name, stream), daemon=True)
            for name, stream in (("out", self.process.stdout), ("err", self.process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def end(self, seconds: float) -> bool:
        """Return whether all processes of the run ended in time, and kill those that did not."""
        ended = processes.wait_for_end(self.mark, seconds)
        processes.kill_all(self.mark)
        self.process.wait()
        for reader, stream in zip(
            self._readers, (self.process.stdout, self.process.stderr), strict=True
        ):
            reader.join(5.0)
            if stream is not None:
                stream.close()
        return ended

    @property
    def out(self) -> str:
        return "".join(self._said["out"])

    @property
    def err(self) -> str:
        return "".join(self._said["err"])

    @property
    def completed(self) -> bool:
        return self.process.returncode == 0

    @property
    def sentence(self) -> str:
        """The last line on its stderr."""
        return (self.err.strip().splitlines() or [""])[-1]

    def pid(self, victim: str) -> int:
        """Return the pid of the process that a case names.

        Raises: ProcessLookupError when the run is over, or never had that process.
        """
        if victim == "launcher":
            return self.process.pid
        until = time.monotonic() + START_S
        while self.process.poll() is None and time.monotonic() < until:
            ranks = processes.ranks(self.mark, self.process.pid)
            found = (
                processes.controller(self.mark)
                if victim == "controller"
                else dict(enumerate(ranks)).get(int(victim))
            )
            if found is not None:
                return found
            threading.Event().wait(0.05)
        raise ProcessLookupError(victim)

    def _read(self, name: str, stream: IO[str]) -> None:
        for line in stream:
            self._said[name].append(line)
            if name == "out":
                self.started.set()
        self.started.set()


def strike(run: Run, case: Case) -> float:
    """Strike the run from outside, as the case says; return the time of it."""
    if case.at_start:
        run.pid(case.victim)
    else:
        run.started.wait(START_S)
    threading.Event().wait(case.delay_s)
    try:
        if case.victim == "disk":
            fill(run.folder / "runs")
        elif case.kind == "full disk":
            resource.prlimit(
                run.pid(case.victim), resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY)
            )
        elif case.signal is not None:
            os.kill(run.pid(case.victim), case.signal)
    except ProcessLookupError:  # the run was over before
        pass
    return time.time()


def play(case: Case) -> Outcome:
    """Play one case, and run the same command again if the case resumes."""
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if case.victim == "disk" and not mounts(folder / "runs"):
            case = replace(case, victim="controller")
        run = Run(case, folder)
        try:
            struck = strike(run, case)
        finally:
            in_time = run.end(RUN_S + DEADLINE_S + GRACE_S)
        if (mark := folder / "struck").exists():
            struck = mark.stat().st_mtime
        elif case.frames is not None and run.completed:
            return Outcome(case, "completed", 0.0, "", "its fault never struck")
        seconds = max(0.0, time.time() - struck)
        how = "completed" if run.completed else "error"
        problem = problem_with(case, run, seconds, in_time)
        if not run.completed and not problem and case.resumes:
            (folder / "runs" / FILLER).unlink(missing_ok=True)  # as if the user had made room
            again = Run(replace(case, frames=None), folder)
            again.end(START_S + RUN_S)
            how = "resumed"
            problem = "" if again.completed else f"cannot be resumed: {again.sentence}"
        if case.victim == "disk":
            subprocess.run(["umount", "--lazy", str(folder / "runs")], check=True)
        return Outcome(case, how, seconds, run.sentence, problem)


def play_and_print(seed: int, index: int, case: Case) -> Outcome:
    """Play a case, and print a line that says how to repeat it."""
    outcome = play(case)
    verdict = f"WRONG: {outcome.problem}" if outcome.problem else "ok"
    print(
        f"{seed}:{index:<3} {case.kind:<24} {case.victim:<10} {outcome.how:<9} "
        f"{outcome.seconds:5.1f} s  {verdict}  {outcome.sentence}",
        flush=True,
    )
    return outcome


def mounts(folder: Path) -> bool:
    """Mount a small file system at `folder`, which takes root; return whether that worked."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "chaos", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def fill(folder: Path) -> None:
    """Fill the file system."""
    with (folder / FILLER).open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def problem_with(case: Case, run: Run, seconds: float, in_time: bool) -> str:
    """Return what is wrong with how the run ended; "" when nothing is."""
    if not in_time:
        return "it did not end, or left processes behind"
    if left := [str(path.relative_to(run.folder)) for path in run.folder.rglob("secret")]:
        return f"it left its secret in {left}"
    if run.completed:
        harmless = case.may_complete or case.frames is not None or case.signal is not None
        return "" if harmless else "it was completed as if nothing had been"
    if seconds > DEADLINE_S + GRACE_S:
        return "it took too long"
    if not (case.expected and matches(case, run.err if case.kind == "full disk" else run.sentence)):
        return (
            f"no sentence says why ({case.expected or 'it had to be completed'}): {run.err[-2000:]}"
        )
    if case.signal is not None and run.process.returncode not in case.codes:
        return f"exit code {run.process.returncode}"
    return ""


def rows(outcomes: list[Outcome]) -> list[Row]:
    """Return the table of survived faults: one row for each kind, and the total."""
    found = []
    for kind in dict.fromkeys(outcome.case.kind for outcome in outcomes):
        ours = [outcome for outcome in outcomes if outcome.case.kind == kind]
        how = ", ".join(
            f"{sum(outcome.how == each for outcome in ours)} {each}"
            for each in sorted({o.how for o in ours})
        )
        found.append(
            Row(
                what=f"{kind} ({how}): slowest end after it",
                value=round(max(outcome.seconds for outcome in ours), 1),
                unit="s",
                bar=f"all of {len(ours)} attributed, in time",
                holds=not any(outcome.problem for outcome in ours),
            )
        )
    survived = sum(not outcome.problem for outcome in outcomes)
    median = statistics.median(outcome.seconds for outcome in outcomes)
    found.append(Row(what="median end after a fault", value=round(median, 1), unit="s"))
    total = Row(what="faults survived", value=survived, unit=f"of {len(outcomes)}", bar="all")
    total.holds = survived == len(outcomes)
    return [*found, total]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", type=int, help="the index of one fault")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    drawn = cases(args.seed, args.faults if args.only is None else args.only + 1)
    chosen = list(enumerate(drawn)) if args.only is None else [(args.only, drawn[args.only])]

    pool = ThreadPoolExecutor(args.jobs)
    try:
        outcomes = list(pool.map(lambda item: play_and_print(args.seed, *item), chosen))
    finally:
        pool.shutdown(cancel_futures=True)
    return finish(__file__, ["torch", "pyzmq"], rows(outcomes), save=args.save, rooms=A_RUN)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
