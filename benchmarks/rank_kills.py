"""One rank of GRPO is killed in each phase: until the run ends, and what the same command gives.

For each phase there is a run of rank_kills_recipe.py whose first or last rank kills itself with
SIGKILL in the middle of the phase. All roles share all ranks, and sleep in turn. The same command
then runs again, and its results are compared with those of a run that nobody disturbed.

Bars: the whole command has ended 10 s after the kill, and its last line names the rank. The same
command goes on from a checkpoint. Final weights, metrics and samples have the same bits. Several
runs at once share the GPUs.

    python -m benchmarks.rank_kills [--ranks 2 4] [--jobs 7] [--save] [sync rollout ...]

A machine without a GPU takes the demo's model.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.rank_kills_recipe import PLACES, STRUCK
from benchmarks.record import MACHINE, counted, finish, gpu, gpu_machine, measured
from benchmarks.table import Row
from tests.gpu.recipes.runs import new_run, write_model
from tests.system.kill_resume import SMALL, Outcome, Run, differences

PACKAGES = ("torch", "pyzmq")
RECIPE = "benchmarks.rank_kills_recipe"
END_S = 10.0


@dataclass(frozen=True)
class Killed:
    """A run one of whose ranks was killed.

    `seconds` is the time from the kill to the end of the whole command, and `sentence` its last
    line. `outcome` is what the same command then ended with; None where it did not go on.
    """

    phase: str
    rank: int
    code: int
    seconds: float
    sentence: str
    outcome: Outcome | None

    @property
    def is_named(self) -> bool:
        """Whether the run failed with a sentence that names the rank."""
        named = rf"lost rank {self.rank} |rank {self.rank} was killed by SIGKILL"
        return self.code == 1 and re.search(named, self.sentence) is not None


def new(folder: Path, name: str, num_ranks: int, *more: str) -> Run:
    """Return a run of five steps that has not begun. On GPUs, `folder` holds its model."""
    words = [RECIPE, f"--nproc={num_ranks}", "--offload.sleep=always"]
    if torch.cuda.is_available():
        return new_run(folder, name, words, *more)
    return Run(folder, [*words, *SMALL, "--engine.num_pages=256", *more], name=name)


def kill(folder: Path, phase: str, rank: int, num_ranks: int) -> Killed:
    """Have a rank killed in a phase, and run the same command again.

    Raises: RuntimeError where the run came to its end without a kill, or failed before it.
    """
    words = (f"--dies_in={phase}", f"--victim={rank}")
    run = new(folder, f"{phase}-{num_ranks}", num_ranks, *words)
    code, ended = run.start(), time.time()
    struck, sentence = run.folder / STRUCK, run.output.strip().splitlines()[-1]
    if not struck.exists():
        raise RuntimeError(f"rank {rank} was not killed in {phase}: {run.output}")
    seconds = ended - struck.stat().st_mtime
    goes_on = run.start() == 0 and "resuming at step" in run.output
    print(f"{phase}: after {seconds:.1f} s: {sentence}", flush=True)
    if not goes_on:
        print(f"{phase}: the same command did not go on: {run.output}", flush=True)
    return Killed(phase, rank, code, seconds, sentence, Outcome.of(run.folder) if goes_on else None)


def campaign(
    folder: Path, num_ranks: int, phases: Sequence[str], num_jobs: int
) -> tuple[Outcome, list[Killed]]:
    """Return what an undisturbed run ends with, and a killed run for each phase.

    The first and the last rank take turns. `num_jobs` runs go on at once.
    """
    with ThreadPoolExecutor(num_jobs) as pool:
        whole = pool.submit(new(folder, f"whole-{num_ranks}", num_ranks).finish)
        killed = [
            pool.submit(kill, folder, phase, (0, num_ranks - 1)[number % 2], num_ranks)
            for number, phase in enumerate(phases)
        ]
        return whole.result(), [one.result() for one in killed]


def rows_of(num_ranks: int, whole: Outcome, killed: list[Killed]) -> Iterator[Row]:
    for one in killed:
        what = f"{num_ranks} ranks, rank {one.rank} killed in {one.phase}: until the run ended"
        yield measured(what, one.seconds, "s", at_most=END_S)
    outcomes = [one.outcome for one in killed]
    for what, each in {
        "runs whose last line names the rank": [one.is_named for one in killed],
        "runs that the same command goes on with": [one is not None for one in outcomes],
        "runs with the final weights of an undisturbed run": [
            one is not None and one.weights == whole.weights for one in outcomes
        ],
        "runs with its metrics and samples too": [
            one is not None and not differences(whole, one) for one in outcomes
        ],
    }.items():
        yield counted(f"{num_ranks} ranks: {what}", each)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("phases", nargs="*", help=f"some of {', '.join(PLACES)}; all without any")
    parser.add_argument("--ranks", type=int, nargs="+", default=[max(torch.cuda.device_count(), 2)])
    parser.add_argument("--jobs", type=int, default=1 + len(PLACES), help="runs at once")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = Path(name)
        write_model(folder / "model")
        for num_ranks in options.ranks:
            found = campaign(folder, num_ranks, options.phases or list(PLACES), options.jobs)
            rows += rows_of(num_ranks, *found)
    on_gpu = torch.cuda.is_available()
    machine, facts = (gpu_machine(), gpu()) if on_gpu else (MACHINE, {})
    return finish(__file__, PACKAGES, rows, save=options.save, machine=machine, **facts)


if __name__ == "__main__":
    sys.exit(main())
