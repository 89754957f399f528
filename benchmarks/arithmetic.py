"""Training of the arithmetic example on this machine: does it learn, and how fast.

On every split the run must learn without any mismatched token.

    python -m benchmarks.arithmetic --machine h200 --config examples/arithmetic/gpu.toml \\
        one split colocated --save

`one` is one rank. `split` is one train and one engine rank. `colocated` is two ranks that serve
both roles. `hybrid0` to `hybrid2` are that with layers that hand a state on, with other seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.ran_files import A_RUN
from benchmarks.record import finish, measured
from benchmarks.table import Row

PACKAGES = ("torch", "transformers", "numpy", "pyzmq", "msgspec")
MODES = {
    "one": ["--nproc=1"],
    "split": ["--nproc=2", "--split.train.ranks=1", "--split.infer.ranks=1"],
    "colocated": ["--nproc=2"],
    **{
        f"hybrid{seed}": [
            *("--nproc=2", f"--run.seed={seed}"),
            "--model=examples/arithmetic/model-hybrid",
        ]
        for seed in range(3)
    },
}
RECIPE = "examples/arithmetic/recipe.py"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modes", nargs="+", choices=MODES)
    parser.add_argument("--machine", default="laptop")
    parser.add_argument("--config", default="examples/arithmetic/demo.toml")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for mode in options.modes:
            rows += measure(mode, options.config, Path(folder))
    return finish(__file__, PACKAGES, rows, save=options.save, rooms=A_RUN, machine=options.machine)


def measure(mode: str, config: str, folder: Path) -> Iterator[Row]:
    """Run the example once and read its metrics."""
    command = [
        sys.executable,
        "-c",
        "import sys; from spmd_rl.cli.main import main; sys.exit(main())",
        "run",
        RECIPE,
    ]
    began = time.time()
    subprocess.run(
        [
            *command,
            f"--config={config}",
            f"--run.folder={folder}",
            f"--run.name={mode}",
            *MODES[mode],
        ],
        check=True,
    )
    ended = time.time()
    rows = [json.loads(line) for line in (folder / mode / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward/mean" in row]  # the others are evaluations

    def column(name: str) -> list[Any]:
        return [step[name] for step in steps]

    rewards = column("reward/mean")
    yield measured(f"{mode}: reward of the first step", rewards[0], "", at_most=0.5)
    yield measured(
        f"{mode}: mean reward of the last 5 of {len(steps)} steps",
        statistics.mean(rewards[-5:]),
        "",
        at_least=0.9,
    )
    yield measured(
        f"{mode}: mismatched tokens", sum(column("onpolicy/mismatched_tokens")), "tokens", at_most=0
    )
    yield measured(f"{mode}: compared tokens", sum(column("onpolicy/compared_tokens")), "tokens")
    yield measured(f"{mode}: start to first reward", steps[0]["unix_s"] - began, "s")
    yield measured(f"{mode}: start to end", ended - began, "s")
    yield measured(f"{mode}: step, median", statistics.median(column("time/step")), "s")
    yield measured(
        f"{mode}: rollout, median", statistics.median(column("rollout/tokens_per_s")), "tokens/s"
    )


if __name__ == "__main__":
    sys.exit(main())
