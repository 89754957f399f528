"""Pushes of weights between the GPUs of one host, beside plain transfers between the same GPUs.

Masters are random and sharded as FSDP2 shards them; engines hold the whole model in bfloat16. The
recipe push_across_recipe.py runs once for each placement and number of ranks:

    split       half of the ranks hold masters, the others an engine each
    colocated   each rank holds its shard of the masters and an engine

Between two pushes the same ranks make plain transfers in the same process group. The rate of send
and receive is the best of its sizes of a buffer, which all sources send to all engines at once.
Times are medians over the pushes after warm-ups, each of the slowest rank, between CUDA events that
include the transfer. The pause goes from the opening of a push to its commit. Pushes that are timed
are not compared; the first one is, with a check of the comparison.

Bars, on GPUs: split, a push has 0.8 of that rate, and the pause is at most 1.2 times what its bytes
take at that rate; colocated, the pause is at most twice an all-gather in which each rank receives
as many bytes.

    python -m benchmarks.push_across_gpus [--shape 8B] [--ranks 2 4] [--save]
        [--placement split colocated] [--masters float32]

On a machine without a GPU, --shape demo tries the script with the demo's model.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import msgspec
import torch

from benchmarks.push_across_recipe import FILE, WARM_UPS, Measured, Received
from benchmarks.record import MACHINE, compared, finish, gpu, gpu_machine, measured
from benchmarks.several_gpus import DEMO, placement_words
from benchmarks.shapes import write_config
from benchmarks.table import Row
from spmd_rl.weights.plan.moves import bucket_bytes

PACKAGES = ("torch", "numpy")
RECIPE = "benchmarks.push_across_recipe"
SHAPES = ("demo", "0.6B", "8B")
PLACEMENTS = ("split", "colocated")
RATE_BAR, PAUSE_BAR, COLOCATED_BAR = 0.8, 1.2, 2.0
DEMO_BUFFERS = "[65536, 262144]"


def run(shape: str, masters: str, placement: str, num_ranks: int, folder: Path) -> Measured:
    """Run the recipe, and return what it measured."""
    name = f"{shape}-{placement}-{num_ranks}"
    model = DEMO if shape == "demo" else folder / "model"
    words = [
        *placement_words(placement, num_ranks),
        f"--folder={model}",
        f"--masters={masters}",
        f"--run.folder={folder}",
        f"--run.name={name}",
        *([f"--buffer_bytes={DEMO_BUFFERS}"] if shape == "demo" else []),
    ]
    command = "import sys; from spmd_rl.cli.main import main; sys.exit(main())"
    subprocess.run([sys.executable, "-c", command, "run", RECIPE, *words], check=True)
    return msgspec.json.decode((folder / name / FILE).read_bytes(), type=Measured)


def slowest(turns: Sequence[Sequence[float]]) -> float:
    """Return the median, over the turns after warm-ups, of the slowest rank's seconds."""
    return median(max(ranks) for ranks in turns[WARM_UPS:])


def of_pushes(found: Measured, what: Callable[[Received], float]) -> float:
    return slowest([[what(rank) for rank in push.received] for push in found.pushes])


def rates(found: Measured) -> dict[int, float]:
    """Return the bytes that a rank receives per second in plain transfers, by the buffer's size."""
    of_buffer = found.num_senders * found.transfers
    return {size: size * of_buffer / slowest(turns) for size, turns in found.plain.items()}


def rows_of(what: str, found: Measured, *, with_bars: bool) -> Iterator[Row]:
    transfer_s = of_pushes(found, lambda rank: rank.transfer_s)
    pause_s = of_pushes(found, lambda rank: rank.pause_s)
    plain = rates(found)
    rate = max(plain.values())
    if found.gathers:
        floor, floor_s = "an all-gather of as many bytes", slowest(found.gathers)
        rate_bar, pause_bar = None, COLOCATED_BAR
    else:
        floor, floor_s = "its bytes at the rate of send and receive", found.received_bytes / rate
        rate_bar, pause_bar = RATE_BAR, PAUSE_BAR
    yield compared(
        f"{what}: rate of a push",
        found.received_bytes / transfer_s / 1e9,
        "GB/s",
        peer="send and receive",
        peer_value=rate / 1e9,
        at_least=rate_bar if with_bars else None,
    )
    yield compared(
        f"{what}: pause of generation",
        pause_s * 1e3,
        "ms",
        peer=floor,
        peer_value=floor_s * 1e3,
        at_most=pause_bar if with_bars else None,
    )
    yield measured(f"{what}: transfer", transfer_s * 1e3, "ms")
    host_s = of_pushes(found, lambda rank: rank.host_s)
    yield measured(f"{what}: until the host had queued it", host_s * 1e3, "ms")
    round_trip_s = median(push.seconds for push in found.pushes[WARM_UPS:])
    yield measured(f"{what}: the controller's round trip", round_trip_s * 1e3, "ms")
    for size, of_size in plain.items():
        yield measured(f"{what}: send and receive, buffers of {_mib(size)}", of_size / 1e9, "GB/s")
    if found.gathers:
        gathered = found.received_bytes / floor_s / 1e9
        yield measured(f"{what}: all-gather, received by a rank", gathered, "GB/s")
    yield from _counts(what, found)


def _counts(what: str, found: Measured) -> Iterator[Row]:
    received, sent = found.received_bytes, found.received_bytes * found.num_receivers
    yield measured(f"{what}: received by an engine's rank", received / 1e9, "GB")
    yield measured(f"{what}: sent by a source's rank", sent / found.num_sources / 1e9, "GB")
    yield measured(f"{what}: copied within an engine's rank", found.local_bytes / 1e9, "GB")
    size = bucket_bytes(found.num_sources, found.num_receivers)
    rounds = -(-received // found.num_senders // size)
    yield measured(f"{what}: rounds of buckets, at least", rounds, "rounds")
    verified = found.pushes[0].num_verified
    yield measured(f"{what}: compared tensors, all equal", verified, "tensors", at_least=1)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:g} MiB"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="8B")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="even numbers")
    parser.add_argument("--placement", nargs="+", choices=PLACEMENTS, default=PLACEMENTS)
    parser.add_argument("--masters", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        if options.shape != "demo":
            write_config(options.shape, folder / "model")
        for placement in options.placement:
            for num_ranks in options.ranks:
                found = run(options.shape, options.masters, placement, num_ranks, folder)
                model = f"{options.shape} in {options.masters}"
                where = f"{found.num_sources} to {found.num_receivers} ranks, {placement}"
                rows += rows_of(f"{model}, {where}", found, with_bars=on_gpu)
                print(f"{model}, {where}: {msgspec.json.encode(found).decode()}", flush=True)
    machine, facts = (gpu_machine(), gpu()) if on_gpu else (MACHINE, {})
    return finish(__file__, PACKAGES, rows, save=options.save, machine=machine, **facts)


if __name__ == "__main__":
    sys.exit(main())
