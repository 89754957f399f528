"""Sleep and wake of regions on all GPUs of a host at once, beside pinned copies at once.

There is one process for each GPU, and nothing binds it to processors, as in a run. Its region of
8 GiB, in the tensors of a model, is saved and loaded. The peer is one pinned copy of the same size,
on all GPUs at the same time. All pinned memory is the arena's, on the NUMA node of its GPU. The
processes wait for each other before each copy. Before that, each GPU copies while the others are
idle: the ratio to that says whether they share the host's memory or a link.

Rates are of one GPU, each the median of its turns. The result file names the NUMA node of each GPU
("-1": the system does not say it).

    python -m benchmarks.sleep_together [--gpus 4] [--save]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Barrier

import msgspec
import torch

from benchmarks.record import compared, finish, gpu, gpu_machine
from benchmarks.region_copies import (
    COPIED,
    COPY_TURNS,
    GIB,
    copy_rate,
    receipt_rate,
    tensors_in,
    timed,
)
from benchmarks.table import Row
from spmd_rl.offload.arena import PCI_DEVICES
from spmd_rl.offload.regions import Regions
from spmd_rl.offload.residency import Receipt
from spmd_rl.offload.vmm import pci_name

PACKAGES = ("torch", "torch_memory_saver")
SIZE = 8  # GiB of a region
WAIT_S = 300.0  # the last resort for the other processes to come to a copy
SAVED, LOADED, PINNED_OUT, PINNED_IN = "saved", "loaded", "pinned copy out", "pinned copy in"
WHOLE = ", the whole call"

Rates = dict[str, float]  # GB/s, by what was copied
Copies = Sequence[Callable[[], Rates]]  # in the order in which they are made


class Measured(msgspec.Struct):
    """The rates of one GPU: while the others were idle, and while all copied."""

    alone: Rates
    at_once: Rates


def on_every_gpu(num_gpus: int, make: Callable[[int], Copies]) -> list[Measured]:
    """Return what each of so many processes measures; `make` gets its number.

    Blocks: until all have ended. Raises: ProcessRaisedException with what one of them raised.
    """
    barrier = multiprocessing.get_context("spawn").Barrier(num_gpus)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (num_gpus, barrier, make, folder), num_gpus)
        texts = [_file(folder, number).read_bytes() for number in range(num_gpus)]
    return [msgspec.json.decode(text, type=Measured) for text in texts]


def measure(
    number: int, num_gpus: int, barrier: Barrier, make: Callable[[int], Copies], folder: str
) -> None:
    """Be one of the processes, and write what it measures."""
    os.environ["LOCAL_WORLD_SIZE"] = str(num_gpus)  # they share the host's memory
    copies, alone, wait = make(number), Rates(), partial(barrier.wait, WAIT_S)
    for turn in range(num_gpus):
        wait()
        if turn == number:
            alone = typical(copies, lambda: None)
    found = Measured(alone, typical(copies, wait))
    _file(folder, number).write_bytes(msgspec.json.encode(found))


def typical(copies: Copies, wait: Callable[[], object]) -> Rates:
    """Return the median rates of several turns. `wait` is called before each copy."""
    turns: list[Rates] = []
    for _ in range(1 + COPY_TURNS):
        found: Rates = {}
        for copy in copies:
            wait()
            found |= copy()
        turns.append(found)
    return {name: statistics.median(turn[name] for turn in turns[1:]) for name in turns[0]}


def _file(folder: str, number: int) -> Path:
    return Path(folder) / f"{number}.json"


def region_copies(number: int) -> Copies:
    """Return the copies of a region of one GPU, and of as many bytes at a time."""
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    regions = Regions("copies", device)
    tensors_in(regions, "master", SIZE * GIB, device)
    regions.reserve_saves()
    host = regions.reserve(SIZE * GIB)
    own = torch.empty(SIZE * GIB, dtype=torch.uint8, device=device)

    def save() -> Rates:
        regions.note_change("master")
        return _rates(SAVED, *timed(regions.sleep))

    return [
        save,
        lambda: _rates(LOADED, *timed(regions.wake)),
        lambda: {PINNED_OUT: copy_rate(host, own)},
        lambda: {PINNED_IN: copy_rate(own, host)},
    ]


def _rates(what: str, receipt: Receipt, whole_s: float) -> Rates:
    return {what: receipt_rate(receipt), what + WHOLE: receipt.copied_bytes / whole_s / 1e9}


def rows_of(measured: Sequence[Measured]) -> Iterator[Row]:
    name = f"{len(measured)} GPUs at once, {SIZE} GiB each"

    def beside(what: str, which: str, peer: str, peer_rates: list[float], bar: bool) -> Row:
        pick = min if which == "slowest GPU" else statistics.median
        return compared(
            f"{name}: {what}, {which}",
            pick([one.at_once[what] for one in measured]),
            "GB/s",
            peer=peer,
            peer_value=pick(peer_rates),
            at_least=COPIED if bar else None,
        )

    for what, pinned in ((SAVED, PINNED_OUT), (LOADED, PINNED_IN)):
        at_once = [one.at_once[pinned] for one in measured]
        for which in ("median GPU", "slowest GPU"):
            yield beside(what, which, "pinned copies at once", at_once, bar=True)
        yield beside(what + WHOLE, "median GPU", "pinned copies at once", at_once, bar=False)
        for kind in (what, pinned):
            alone = [one.alone[kind] for one in measured]
            yield beside(kind, "median GPU", "each GPU alone", alone, bar=False)


def numa_nodes(num_gpus: int) -> str:
    """Return the NUMA node of each GPU, as the system has it."""
    files = [PCI_DEVICES / pci_name(torch.device("cuda", one)) for one in range(num_gpus)]
    return " ".join(
        (one / "numa_node").read_text().strip() if one.exists() else "-1" for one in files
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows = list(rows_of(on_every_gpu(options.gpus, region_copies)))
    facts = gpu() | {"numa_nodes": numa_nodes(options.gpus)}
    return finish(__file__, PACKAGES, rows, save=options.save, machine=gpu_machine(), **facts)


if __name__ == "__main__":
    sys.exit(main())
