"""What 8 bits cost in learning: GRPO with whole weights, with weights in 8 bits, and with keys and
values in 8 bits too, several seeds of each.

    python -m benchmarks.coded_learning arithmetic --save
    python -m benchmarks.coded_learning arithmetic_gpu --at-once 9 --machine h100 --save \
        --engine.num_pages=1024 --engine.page_size=128
    python -m benchmarks.coded_learning instructions --machine h100 --save

The runs of a seed differ in the formats alone. Each has one rank. They take place one after the
other, or several at once, which then share a GPU: no time is reported. The instructions need the
folders that examples/instructions/README.md makes, and a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.ran_files import A_RUN
from benchmarks.record import MACHINE, finish, measured
from benchmarks.table import Row

PACKAGES = ("torch", "transformers", "numpy", "pyzmq", "msgspec")
RECIPES = {  # of an example: what is run, and with which settings
    "arithmetic": ["examples/arithmetic/recipe.py", "--config=examples/arithmetic/demo.toml"],
    "arithmetic_gpu": [
        "examples/arithmetic/recipe.py",
        "--config=examples/arithmetic/gpu.toml",
    ],
    "instructions": ["grpo", "--config=examples/instructions/gpu.toml"],
}
WEIGHTS = ["--trainer.weights=e4m3", "--engine.weights=e4m3"]
CACHE = ["--trainer.cache=e4m3", "--engine.cache=e4m3"]
FORMATS = {"full": [], "weights": WEIGHTS, "weights and cache": [*WEIGHTS, *CACHE]}
LAST = 10  # steps that the reward is averaged over
BAR = 0.05  # between the mean rewards of a format and of whole numbers
RUN = "import sys; from spmd_rl.cli.main import main; sys.exit(main())"
Steps = list[dict[str, Any]]


def steps_of(kind: str, words: Sequence[str], seed: int) -> Steps:
    """Run an example once in a format, and return the metrics of its training steps."""
    seeds = [f"--run.seed={seed}", f"--trainer.seed={seed}"]
    with tempfile.TemporaryDirectory() as folder:
        where = [f"--run.folder={folder}", "--run.name=one", "--nproc=1"]
        command = [sys.executable, "-c", RUN, "run", *words, *seeds, *where]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = map(json.loads, Path(folder, "one/metrics.jsonl").read_text().splitlines())
        steps = [row for row in rows if row["step"] > 0 and "reward/mean" in row]
    print(f"{kind}, seed {seed}: {last_reward(steps):.4f}", flush=True)
    return steps


def last_reward(steps: Steps) -> float:
    return statistics.mean(step["reward/mean"] for step in steps[-LAST:])


def rows_of(found: Mapping[str, Mapping[int, Steps]], example: str) -> Iterator[Row]:
    means = {}
    for kind, runs in found.items():
        name = f"{example}, {kind}"
        for seed, steps in runs.items():
            last = f"mean reward of the last {LAST} of {len(steps)} steps"
            yield measured(f"{name}, seed {seed}: {last}", last_reward(steps), "")
        every = [step for steps in runs.values() for step in steps]
        means[kind] = statistics.mean(map(last_reward, runs.values()))
        yield measured(f"{name}: mean of {len(runs)} seeds", means[kind], "")
        unequal = sum(step["onpolicy/mismatched_tokens"] for step in every)
        yield measured(f"{name}: unequal tokens", unequal, "tokens", at_most=0)
        compared = sum(step["onpolicy/compared_tokens"] for step in every)
        yield measured(f"{name}: compared tokens", compared, "tokens")
        if "engine/kv_clipped" in every[0]:
            clipped = max(step["engine/kv_clipped"] for step in every)
            yield measured(f"{name}: largest share of clipped keys and values", clipped, "")
        if kind != "full":
            lost = f"{name}: reward lost beside full"
            yield measured(lost, means["full"] - means[kind], "", at_most=BAR)


def compare(script: str, doc: str | None, formats: Mapping[str, Sequence[str]]) -> int:
    """Run an example in each of the formats, and return 1 if a bar is missed, else 0."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("example", choices=RECIPES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--at-once", type=int, default=1, help="runs that share the machine")
    parser.add_argument("--machine", default=MACHINE)
    parser.add_argument("--save", action="store_true")
    options, words = parser.parse_known_args()
    own = [*RECIPES[options.example], *words]
    planned = [
        (kind, [*own, *given], seed) for seed in options.seeds for kind, given in formats.items()
    ]
    with ThreadPoolExecutor(options.at_once) as pool:
        ended = list(pool.map(steps_of, *zip(*planned, strict=True)))
    found: dict[str, dict[int, Steps]] = {kind: {} for kind in formats}
    for (kind, _, seed), steps in zip(planned, ended, strict=True):
        found[kind][seed] = steps
    rows = list(rows_of(found, options.example))
    return finish(script, PACKAGES, rows, save=options.save, rooms=A_RUN, machine=options.machine)


if __name__ == "__main__":
    sys.exit(compare(__file__, __doc__, FORMATS))
