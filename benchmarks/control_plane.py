"""Cost of calling all workers and collecting their answers: our controller, Ray and plain ZeroMQ.

Each worker gets an array of its own and sends it back (control/echo.py). Every worker and every
contender is a process. The contenders take turns, and each number is the median over all turns.
Above 256 workers only plain ZeroMQ runs, with the sockets of eight workers in one process, to
measure what relays gain.

A short run of the demo then gives the controller's share of a step: the metric
perf/controller_share. It is the part of a step in which the controller did not wait for workers.

    python -m benchmarks.control_plane [--quick] [--save] [--workers 8,64,256]

Needs: pip install ray, beside this package. Ray is left out if its workers do not fit in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.peer import Peer
from benchmarks.record import compared, finish, measured
from benchmarks.table import Row

ROOT = Path(__file__).parents[1]
SIZES = {64: "64 B", 4096: "4 KiB", 65536: "64 KiB", 1 << 20: "1 MiB"}
BARS = {"Ray": 0.1, "ZeroMQ": 1.5}  # at BAR_WORKERS and BAR_SIZE, times the peer
BAR_WORKERS, BAR_SIZE = 8, 64
MAX_SHARE = 0.05
RAY_WORKER_BYTES = 90 << 20  # resident, of one idle actor
WORKERS_OF_A_RELAY = 32
MAX_PROCESSES = 256
PER_PROCESS = 8  # workers, above MAX_PROCESSES
MAX_BYTES = 64 << 20  # total of all parts of one call
LAPS_BYTES = 256 << 20  # total of all parts of one turn


class Times:
    """Times of one contender, in microseconds a call."""

    def __init__(self) -> None:
        self.wall_us: list[float] = []
        self.caller_us: list[float] = []

    def turn(self, peer: Peer, size: int, laps: int) -> None:
        reply = peer.ask(laps=laps, size=size)
        self.wall_us += [second * 1e6 for second in reply["seconds"]]
        self.caller_us.append(reply["caller_s"] * 1e6)


def contest(num_workers: int, turns: int) -> Iterator[Row]:
    """Measure all contenders with one number of workers."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        peers = {
            name: stack.enter_context(_start(name, command, folder))
            for name, command in _commands(num_workers).items()
        }
        for size in SIZES if "ours" in peers else [BAR_SIZE]:
            if size * num_workers > MAX_BYTES:
                continue
            laps = max(2, min(50, LAPS_BYTES // (size * num_workers), 2000 // num_workers))
            times = {name: Times() for name in peers}
            for peer in peers.values():
                peer.ask(laps=2, size=size)
            for _ in range(turns):
                for name, peer in peers.items():
                    times[name].turn(peer, size, laps)
            yield from _rows(num_workers, size, times)


def _commands(num_workers: int) -> dict[str, list[str]]:
    workers, relays = str(num_workers), str(num_workers // WORKERS_OF_A_RELAY)
    if num_workers > MAX_PROCESSES:
        direct = ["zeromq", workers, "--per-process", str(PER_PROCESS)]
        return {"ZeroMQ": direct, "ZeroMQ with relays": [*direct, "--relays", relays]}
    commands = {
        "ours": ["ours", workers],
        "ZeroMQ": ["zeromq", workers],
        "ZeroMQ with CURVE": ["zeromq", workers, "--curve"],
    }
    if _available_bytes() > num_workers * RAY_WORKER_BYTES:
        commands["Ray"] = ["ray_actors", workers]
    else:
        print(
            f"Ray is left out at {num_workers} workers: "
            f"they need {num_workers * RAY_WORKER_BYTES >> 30} GiB"
        )
    if num_workers > WORKERS_OF_A_RELAY:
        commands["ZeroMQ with relays"] = ["zeromq", workers, "--relays", relays]
    return commands


def _start(name: str, command: list[str], folder: Path) -> Peer:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    module, *arguments = command
    return Peer(
        [sys.executable, "-m", f"benchmarks.control.{module}", *arguments],
        env,
        folder / f"{name}.log",
    )


def _rows(num_workers: int, size: int, times: dict[str, Times]) -> Iterator[Row]:
    call = "round trip" if num_workers == 1 else f"fan-out and gather, {num_workers} workers"
    wall = {name: median(one.wall_us) for name, one in times.items()}
    busy = {name: min(one.caller_us) for name, one in times.items()}
    what = f"caller's CPU time, {num_workers} workers, {SIZES[size]}"
    for name in ("Ray", "ZeroMQ", "ZeroMQ with CURVE"):
        if name in times and "ours" in times:
            bar = BARS.get(name) if (num_workers, size) == (BAR_WORKERS, BAR_SIZE) else None
            yield compared(
                f"{call}, {SIZES[size]}",
                wall["ours"],
                "us",
                peer=name,
                peer_value=wall[name],
                at_most=bar,
            )
    if size == BAR_SIZE and "ours" in times:
        yield compared(what, busy["ours"], "us", peer="ZeroMQ", peer_value=busy["ZeroMQ"])
    if size == BAR_SIZE and "ZeroMQ with relays" in times:
        relayed = f"plain ZeroMQ through a relay for each {WORKERS_OF_A_RELAY}"
        for label, by_name in ((what, busy), (f"{call}, {SIZES[size]}", wall)):
            mine, direct = by_name["ZeroMQ with relays"], by_name["ZeroMQ"]
            yield compared(f"{label}, {relayed}", mine, "us", peer="direct", peer_value=direct)


def controller_share(steps: int) -> Row:
    """Return the median over a run of the demo with that many steps."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        command = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "-m",
            "spmd_rl",
            "run",
        ]
        recipe = ["examples/arithmetic/recipe.py", "--config", "examples/arithmetic/demo.toml"]
        settings = [
            f"--run.folder={folder}",
            f"--steps={steps}",
            "--warmup_steps=2",
            "--run.save_every=0",
        ]
        subprocess.run(
            [sys.executable, *command, *recipe, *settings],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        lines = (Path(folder) / "demo/metrics.jsonl").read_text().splitlines()
    shares = [row["perf/controller_share"] for row in map(json.loads, lines) if row["step"] > 0]
    return measured(
        "controller's share of the demo's step", median(shares[1:]), "", at_most=MAX_SHARE
    )


def _available_bytes() -> int:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) << 10


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few turns, one and 8 workers")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/laptop/control_plane.json"
    )
    parser.add_argument("--workers", default="", help="numbers of workers, separated by commas")
    arguments = parser.parse_args()
    counts = arguments.workers or ("1,8" if arguments.quick else "1,8,64,256,512,1024")
    rows: list[Row] = []
    for count in counts.split(","):
        rows += contest(
            int(count), turns=3 if arguments.quick else 12 if int(count) <= BAR_WORKERS else 4
        )
    rows.append(controller_share(6 if arguments.quick else 30))
    return finish(__file__, ("pyzmq", "msgspec", "numpy", "ray"), rows, save=arguments.save)


if __name__ == "__main__":
    sys.exit(main())
