"""Kills whole runs at random moments, resumes them, and compares them with an undisturbed run.

python -m tests.system.kill_resume --kills 20 --seed 1
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.shared_gpus import ranks_of, sharing
from tests.system import chaos_processes as processes

REPO = Path(__file__).parents[2]
EXAMPLE = REPO / "examples" / "arithmetic"
COMMAND = (
    sys.executable,
    "-c",
    "import sys; from spmd_rl.cli.main import main; sys.exit(main())",
    "run",
)
Fault = Callable[[int, str], object]  # takes the launcher's pid and the mark of the run's processes
SMALL = [
    f"--model={EXAMPLE / 'model'}",
    f"--data={EXAMPLE / 'train.jsonl'}",
    f"--reward={Path(__file__).with_name('even.py')}:even",
    "--prompts_per_step=4",
    "--sampling.num_samples=4",
    "--sampling.max_tokens=6",
    "--trainer.init=random",
    "--trainer.lr=1e-2",
    "--trainer.schedule=cosine",
    "--trainer.total_steps=40",
    "--run.save_every=1",
    "--steps=5",
]
# groups end at random, and some go on in the next step
ROUNDS = [
    *("--sampler.oversample=1.5", "--sampler.max_lag=2", "--sampler.round_tokens=2"),
    *("--behaviour=rollout", "--mask_lag=1", "--sampling.stop_ids=[20,21,22,23,24,25]"),
]
MODES = {
    "sync": ["grpo", "--nproc=1"],
    "async": ["grpo_async", "--nproc=2", "--split.train.ranks=1", "--split.infer.ranks=1"],
    "sampler": ["grpo", "--nproc=1", "--sampler.oversample=1.5"],
    "rounds": ["grpo", "--nproc=1", *ROUNDS],
    "sharded": ["grpo", "--nproc=2", "--trainer.minibatches=2"],
    "hybrid": ["grpo", "--nproc=2", f"--model={EXAMPLE / 'model-hybrid'}"],
    "asleep": ["grpo", "--nproc=2", "--offload.sleep=always"],
    "shared": ["grpo", "--nproc=2", "--split.infer.tp=2", *ROUNDS],
    "warm-up": [str(EXAMPLE / "recipe.py"), "--nproc=1", "--warmup_steps=30", "--warmup_pairs=32"],
}
# prefixes of metrics that depend on a clock or on other processes
TIMES = ("time/", "engine/", "before/", "perf/", "rollout/tokens_per_s", "memory/", "unix_s")


@dataclass(frozen=True)
class Outcome:
    """The part of a run's results that must not depend on how often it was killed."""

    weights: str
    metrics: list[dict[str, Any]]
    samples: dict[str, str]

    @classmethod
    def of(cls, folder: Path) -> Outcome:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return cls(
            _sha(folder / "hf" / "model.safetensors"),
            [
                {key: value for key, value in row.items() if not key.startswith(TIMES)}
                for row in rows
            ],
            {path.name: _sha(path) for path in sorted((folder / "samples").iterdir())},
        )


@dataclass(frozen=True)
class Moment:
    """A moment: `looks` looks after change `event` of files with `within` in their path."""

    event: int
    looks: int
    within: str = ""

    @classmethod
    def random(cls, rng: random.Random, num_events: int) -> Moment:
        """Return a random moment of a run with `num_events` changes.

        One in three is while a checkpoint is being written.
        """
        if rng.random() < 1 / 3:
            return cls(rng.randint(1, 9), rng.randint(0, 4), within=".part")
        return cls(rng.randint(1, num_events), rng.randint(0, 40))


@dataclass
class Run:
    """One command in one folder, which can be started any number of times."""

    cwd: Path
    words: list[str]
    name: str = "r"
    command: tuple[str, ...] = COMMAND
    output: str = ""
    num_events: int = 0  # changes of files that were seen in the last start
    limit_s: float = 1000.0
    look_s: float = 0.002  # between two looks at the folder, each of which takes processor time

    @property
    def folder(self) -> Path:
        return self.cwd / "runs" / self.name

    def environment(self) -> dict[str, str]:
        """Return the environment that the run starts with."""
        base = {
            k: v for k, v in os.environ.items() if not k.startswith(("SPMD_RL", "TORCHELASTIC"))
        }
        search = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"PYTHONPATH": search, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.cwd)}
        return base | own | sharing(ranks_of(self.words))

    def start(self) -> int:
        """Start the run, let it end by itself, and return the exit code."""
        return self._live(None)

    def finish(self) -> Outcome:
        """Let the run complete."""
        assert self.start() == 0, self.output
        return Outcome.of(self.folder)

    def kill(self, moment: Moment) -> bool:
        """Start the run, and kill all its processes at `moment`; False if it ended before."""
        return self._live(moment, lambda launcher, mark: processes.kill_all(mark)) < 0

    def meet(self, moment: Moment, fault: Fault) -> int:
        """Start the run, call `fault` at `moment`, and return the exit code."""
        return self._live(moment, fault)

    def _live(self, moment: Moment | None, fault: Fault = lambda launcher, mark: None) -> int:
        mark = uuid.uuid4().hex
        with (self.cwd / f"{self.name}.log").open("w+") as log:
            process = subprocess.Popen(
                [*self.command, *self.words, f"--run.name={self.name}"],
                cwd=self.cwd,
                env=self.environment() | {processes.MARK: mark},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                if self._watch(process, moment):
                    fault(process.pid, mark)
                process.wait(self.limit_s)
            finally:
                processes.kill_all(mark)
            code = process.wait()
            log.seek(0)
            self.output = log.read()
        return code

    def _watch(self, process: subprocess.Popen[bytes], moment: Moment | None) -> bool:
        """Count changes in the folder until `moment`; False if the process ended before."""
        seen, give_up_at = self._look(), time.monotonic() + self.limit_s
        self.num_events, num_looks, within = 0, 0, moment.within if moment else ""
        while time.monotonic() < give_up_at:
            try:
                process.wait(self.look_s)
            except subprocess.TimeoutExpired:
                found = self._look()
                self.num_events += sum(within in path for path, _ in found.items() - seen.items())
                seen = found
                if moment is not None and self.num_events >= moment.event:
                    num_looks += 1
                    if num_looks > moment.looks:
                        return True
            else:
                return False
        raise TimeoutError(f"{self.words[0]} did not end within {self.limit_s:g} s")

    def _look(self) -> dict[str, tuple[int, int]]:
        """Return time and size of every file and folder in the run's folder."""
        found = {}
        for where, _, names in os.walk(self.folder):
            for path in (where, *(os.path.join(where, name) for name in names)):
                try:
                    status = os.stat(path)
                except FileNotFoundError:
                    continue
                found[path] = (status.st_mtime_ns, status.st_size)
        return found


def _sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def differences(one: Outcome, other: Outcome) -> list[str]:
    """Return a description of everything that is not equal."""
    found = (
        []
        if one.weights == other.weights
        else [f"weights {one.weights[:12]} and {other.weights[:12]}"]
    )
    if one.metrics != other.metrics:
        pairs = zip(one.metrics, other.metrics, strict=False)
        found.append(f"metrics: {next(pair for pair in pairs if pair[0] != pair[1])}")
    return found + [name for name in one.samples if one.samples[name] != other.samples.get(name)]


def modes_parser(modes: Mapping[str, list[str]]) -> argparse.ArgumentParser:
    """Return the parser of the arguments that campaigns share."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--mode", choices=sorted(modes), action="append", help="default: all, in turn"
    )
    return parser


@dataclass(frozen=True)
class Ended:
    """A run that was killed `num_kills` times and then let end, beside one that was left alone."""

    run: Run
    whole: Run
    num_kills: int
    differences: list[str]


def campaign(
    folder: Path,
    modes: Mapping[str, list[str]],
    num_kills: int,
    seed: int,
    names: list[str],
    *,
    most_kills: int = 3,
    look_s: float = 0.002,
) -> Iterator[Ended]:
    """Kill runs of these modes in turn until there were `num_kills`, each up to `most_kills` times,
    and yield each that ended.
    """
    rng = random.Random(seed)
    whole: dict[str, tuple[Run, Outcome, int]] = {}
    num_killed = num_lives = 0
    while num_killed < num_kills:
        mode = names[num_lives % len(names)]
        if mode not in whole:
            left_alone = Run(folder, [*modes[mode], *SMALL], name=f"{mode}-whole")
            whole[mode] = left_alone, left_alone.finish(), left_alone.num_events
        left_alone, expected, num_events = whole[mode]
        num_lives += 1
        run = Run(folder, [*modes[mode], *SMALL], name=f"{mode}-{num_lives}", look_s=look_s)
        moments = []
        for _ in range(rng.randint(1, most_kills)):
            moment = Moment.random(rng, num_events)
            if not run.kill(moment):
                break
            moments.append(moment)
        num_killed += len(moments)
        found = differences(expected, run.finish())
        when = ", ".join(
            f"change {m.event}{f' of a {m.within}' * bool(m.within)} + {m.looks}" for m in moments
        )
        print(f"{mode}: killed at {when or 'no time'}: {found or 'equal'}", flush=True)
        yield Ended(run, left_alone, len(moments), found)


def main() -> int:
    args = modes_parser(MODES).parse_args()
    names = args.mode or list(MODES)
    print(f"seed {args.seed}, {args.kills} kills, modes {', '.join(names)}")
    with tempfile.TemporaryDirectory() as folder:
        ended = [*campaign(Path(folder), MODES, args.kills, args.seed, names)]
    num_killed = sum(one.num_kills for one in ended)
    num_wrong = sum(bool(one.differences) for one in ended)
    print(f"{num_killed} kills in {len(ended)} runs, {num_wrong} runs differ")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
