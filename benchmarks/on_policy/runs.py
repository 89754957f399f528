"""Runs of the study: one recipe with engines that agree with the trainer more or less.

    python -m benchmarks.on_policy.runs OUT [--gpus 2 3] [--slots 4] [--limit-s 900]
        [--variants exact planted ...] [--tasks ...] [--sglang SITE] [--seeds 0 1 2]
    python -m benchmarks.on_policy.runs OUT --join

Runs of one task, rate and seed differ in the engine, its correction or its staleness alone. Several
share a GPU, so no time is reported. OUT gets a file of each run that has ended; the same command
passes over these. --join writes all of them to runs.json beside this file, from which figures.py
makes the page's tables and pictures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.record import gpu

RUNS = Path(__file__).parent / "runs.json"
RUN = "import sys; from spmd_rl.cli.main import main; sys.exit(main())"
# Room for keys and values is said, so that no run counts on memory that another one takes.
NATIVE = ["--engine.num_pages=2400", "--engine.page_size=128"]
SMALL = ["--trainer.max_tokens=16384", "--trainer.backend.recompute=all"]  # of a run's memory
SGLANG = [
    "--engine.kind=sglang",
    "--engine.options.attention_backend=triton",
    "--engine.options.cuda_graph_max_bs_decode=256",
    "--engine.options.max_total_tokens=262144",
]
SPLIT = ["--nproc=2", "--split.train.ranks=1", "--split.infer.ranks=1"]
TRUNCATED = ["--correction.mode=truncate", "--correction.high=2.0"]
EXACT, PLANTED, ASYNC = "exact", "planted", ("one-ahead", "asynchronous")
INEXACT = "--run.exact=false"
# What each run keeps of its steps: its name here, and that of the metric.
KEPT = {
    "reward": "reward/mean",
    "kl": "train/kl",
    "grad_norm": "train/grad_norm",
    "clip_frac": "train/clip_frac",
    "entropy": "train/entropy",
    "mean_abs_dlogp": "onpolicy/mean_abs_dlogp",
    "max_abs_dlogp": "onpolicy/max_abs_dlogp",
    "chi2": "onpolicy/chi2",
    "tokens": "onpolicy/compared_tokens",
    "unequal": "onpolicy/mismatched_tokens",
    "lag": "version/lag_mean",
    "length": "rollout/response_tokens_mean",
}


class Variant(NamedTuple):
    """Words of a command by variant. `num_gpus`: ranks, each of which wants a GPU."""

    words: list[str]
    num_gpus: int = 1


VARIANTS = {
    EXACT: Variant(["--nproc=1", *NATIVE]),
    PLANTED: Variant(["--nproc=1", *NATIVE, INEXACT]),
    "sglang": Variant(["--nproc=1", *SGLANG, INEXACT]),
    "sglang-tis": Variant(["--nproc=1", *SGLANG, INEXACT, *TRUNCATED]),
    "one-ahead": Variant([*SPLIT, *NATIVE], 2),
    "asynchronous": Variant([*SPLIT, *NATIVE, "--sampler.max_lag=4"], 2),
}


class Task(NamedTuple):
    """Settings of a task, its recipe by variant, and its rates, the usual one first."""

    words: list[str]
    recipe: str
    recipes: dict[str, str]
    rates: tuple[float, ...]


TASKS = {
    "instructions": Task(
        [
            "--config=examples/instructions/gpu.toml",
            "--eval.sets={}",
            "--eval.data=examples/instructions/eval.jsonl",
            "--eval.every=20",
            *SMALL,
        ],
        "grpo",
        {
            PLANTED: "benchmarks.on_policy.planted_grpo",
            "one-ahead": "grpo_async",
            "asynchronous": "grpo_fully_async",
        },
        (3e-5, 3e-4, 1e-3),
    ),
    "arithmetic": Task(
        ["--config=examples/arithmetic/gpu.toml", *SMALL],
        "examples/arithmetic/recipe.py",
        {PLANTED: "benchmarks.on_policy.planted_arithmetic"},
        (1e-4, 1e-3, 3e-4),
    ),
    "demo": Task(
        ["--config=examples/arithmetic/demo.toml", "--trainer.max_tokens=2048"],
        "examples/arithmetic/recipe.py",
        {PLANTED: "benchmarks.on_policy.planted_arithmetic"},
        (2e-3,),
    ),
}


class Run(NamedTuple):
    task: str
    variant: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}_{self.variant}_{self.lr:g}_{self.seed}"


def planned(tasks: Sequence[str], variants: Sequence[str], seeds: Sequence[int]) -> Iterator[Run]:
    """Yield all runs, so that those which are cut off leave whole comparisons behind."""
    for number in range(3):
        for seed in seeds:
            for task in tasks:
                for variant in variants:
                    is_stale = variant in ASYNC and task != "instructions"
                    if number < len(TASKS[task].rates) and not is_stale:
                        yield Run(task, variant, TASKS[task].rates[number], seed)


def words_of(run: Run, folder: Path, sglang: str) -> list[str]:
    task, variant = TASKS[run.task], VARIANTS[run.variant]
    return [
        "run",
        task.recipes.get(run.variant, task.recipe),
        *task.words,
        *variant.words,
        *([f"--engine.python={sglang}"] if run.variant.startswith("sglang") else []),
        f"--trainer.lr={run.lr}",
        f"--run.seed={run.seed}",
        f"--prompts.seed={run.seed}",
        f"--run.folder={folder}",
        f"--run.name={run.name}",
        "--run.save_every=0",
    ]


def reduced(run: Run, metrics: Path) -> dict[str, Any]:
    """Return what is kept of a run: its steps column by column, with four digits."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row for row in rows if row["step"] > 0 and "reward/mean" in row]
    columns = {
        name: [float(f"{row[metric]:.4g}") if metric in row else None for row in steps]
        for name, metric in KEPT.items()
    }
    held_out = {
        str(row["step"]): round(row["eval/reward"], 4) for row in rows if "eval/reward" in row
    }
    return run._asdict() | {"steps": columns, "held_out": held_out}


class Slots:
    """Seats on GPUs. A run of two ranks takes a seat on each of two."""

    def __init__(self, gpus: Sequence[int], seats: int) -> None:
        self._free = dict.fromkeys(gpus, seats)
        self._changed = threading.Condition()

    def take(self, count: int, end: float) -> list[int] | None:
        """Wait for `count` GPUs with a free seat. Returns None when the time is over."""
        with self._changed:
            while True:
                ready = sorted(
                    (gpu for gpu, free in self._free.items() if free), key=self._free.get
                )
                if len(ready) >= count:
                    taken = ready[-count:]
                    for one in taken:
                        self._free[one] -= 1
                    return taken
                left = end - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return None

    def give(self, gpus: Sequence[int]) -> None:
        with self._changed:
            for one in gpus:
                self._free[one] += 1
            self._changed.notify_all()


def execute(run: Run, gpus: Sequence[int], end: float, options: argparse.Namespace) -> None:
    """Run to its end or until the time is over, and write what it gave if it ended well."""
    folder = options.out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    words = words_of(run, folder, options.sglang)
    with open(folder / f"{run.name}.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, *words], stdout=log, stderr=log, env=environment
        )
        try:
            code = process.wait(max(end - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            print(f"{run.name}: the time is over", flush=True)
            return
    if code:
        print(f"{run.name}: exit code {code}", flush=True)
        return
    machine = gpu() if torch.cuda.is_available() else {"gpu": "none"}
    found = reduced(run, folder / run.name / "metrics.jsonl") | {"machine": machine}
    (options.out / f"{run.name}.json").write_text(json.dumps(found))
    rewards = found["steps"]["reward"]
    print(f"{run.name}: reward {rewards[0]} -> {rewards[-1]}, {found['held_out']}", flush=True)


def run_all(options: argparse.Namespace) -> None:
    end = time.monotonic() + options.limit_s
    slots, threads = Slots(options.gpus, options.slots), []

    def one(run: Run, gpus: list[int]) -> None:
        try:
            execute(run, gpus, end, options)
        finally:
            slots.give(gpus)

    for run in planned(options.tasks, options.variants, options.seeds):
        if (options.out / f"{run.name}.json").exists():
            continue
        gpus = slots.take(VARIANTS[run.variant].num_gpus, end)
        if gpus is None:
            break
        threads.append(threading.Thread(target=one, args=(run, gpus)))
        threads[-1].start()
    for thread in threads:
        thread.join()


def join(out: Path, commit: str) -> None:
    """Write all runs into one file, a line each."""
    runs = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    lines = ",\n".join(json.dumps(run, separators=(",", ":")) for run in runs)
    RUNS.write_text(f'{{"commit":"{commit}","runs":[\n{lines}\n]}}\n')


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int, nargs="+", default=[0])
    parser.add_argument("--slots", type=int, default=4, help="runs that share a GPU")
    parser.add_argument("--limit-s", type=float, default=1e6)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sglang", default="", help="as engine.python")
    parser.add_argument("--join", metavar="COMMIT", default="", help="of the code that ran")
    options = parser.parse_args()
    if options.join:
        join(options.out, options.join)
    else:
        run_all(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
