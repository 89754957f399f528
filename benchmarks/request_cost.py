"""Cost of single requests: the controller's processor time for each, and memory over very many.

A recipe (request_recipe.py) keeps 4,096 calls of `complete` in flight on two engines with the model
of the demo: prompts of 24 tokens, answers of 4. Each call that ends is followed by the next. The
processor time is that of all threads of the controller's process, from the first call to the last
answer. It includes the recipe's own work and the recording of spans.

Memory is what a process alone has. It is read every 10,000 requests, while others are in flight.
Its growth is the median of the last three readings less that of the three that begin at 20,000.

    python -m benchmarks.request_cost [--quick] [--profile] [--save]

With --profile it prints what the recipe's thread does, and saves nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import pstats
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.record import finish, measured
from benchmarks.request_recipe import FILE, PROFILE, Reading, Usage
from benchmarks.table import Row

ROOT = Path(__file__).parents[1]
COMMAND = [
    sys.executable,
    "-c",
    "import sys; from spmd_rl.cli.main import main; sys.exit(main())",
    "run",
    "benchmarks.request_recipe",
    "--nproc=2",
]
REQUESTS, QUICK, CONCURRENT, EVERY = 100_000, 20_000, 4096, 10_000
SETTLED, READINGS = 20_000, 3  # requests before the first of so many readings of memory
COST_BAR_MS, GROWTH_BAR_MIB = 0.3, 8.0  # growth: 100 bytes a request


@dataclass(frozen=True)
class Found:
    """What the recipe wrote."""

    readings: list[Reading]
    left: dict[str, int]


def run(folder: Path, requests: int, *, profile: bool = False) -> Found:
    words = [
        f"--requests={requests}",
        f"--concurrent={CONCURRENT}",
        f"--every={EVERY}",
        f"--profile={str(profile).lower()}",
        f"--run.folder={folder}",
        "--run.name=requests",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*COMMAND, *words], cwd=ROOT, check=True, env=environment)
    told = json.loads((folder / "requests" / FILE).read_text())
    return Found([_reading(**one) for one in told["readings"]], told["left"])


def _reading(controller: dict[str, float], ranks: list[dict[str, float]], **rest: float) -> Reading:
    return Reading(**rest, controller=Usage(**controller), ranks=[Usage(**one) for one in ranks])


def growth_mib(memory_bytes: list[int]) -> float:
    """Return how much the last readings are above the first."""
    first, last = memory_bytes[:READINGS], memory_bytes[-READINGS:]
    return (median(last) - median(first)) / 2**20


def rows_of(found: Found) -> Iterator[Row]:
    first, last = found.readings[0], found.readings[-1]
    what = f"{last.num_requests:,} requests, {CONCURRENT:,} in flight"
    used_s = last.controller.processor_s - first.controller.processor_s
    cost_ms = 1e3 * used_s / last.num_requests
    yield measured(
        f"{what}: the controller's processor time for a request", cost_ms, "ms", at_most=COST_BAR_MS
    )
    rate = last.num_requests / (last.seconds - first.seconds)
    yield measured(f"{what}: rate", rate, "requests/s")
    settled = [one for one in found.readings if one.num_requests >= SETTLED]
    if len(settled) > READINGS:
        memory = {"controller": [one.controller.memory_bytes for one in settled]}
        for rank in range(len(last.ranks)):
            memory[f"rank {rank}"] = [one.ranks[rank].memory_bytes for one in settled]
        for process, readings in memory.items():
            yield measured(f"{what}: memory of {process}", median(readings) / 2**20, "MiB")
            yield measured(
                f"{what}: growth of {process} after {SETTLED:,}",
                growth_mib(readings),
                "MiB",
                at_most=GROWTH_BAR_MIB,
            )
    held = ", ".join(found.left)
    yield measured(f"{what}: left at the end ({held})", sum(found.left.values()), "", at_most=0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK:,} requests, no growth")
    parser.add_argument("--profile", action="store_true", help="profile the recipe's thread")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        requests = QUICK if options.quick or options.profile else REQUESTS
        found = run(folder, requests, profile=options.profile)
        if options.profile:
            stats = pstats.Stats(str(folder / "requests" / PROFILE))
            stats.sort_stats("tottime").print_stats(30)
    save = options.save and not options.profile
    return finish(__file__, ("torch", "pyzmq", "msgspec", "numpy"), list(rows_of(found)), save=save)


if __name__ == "__main__":
    sys.exit(main())
