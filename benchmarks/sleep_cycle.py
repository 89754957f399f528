"""Sleep and wake of regions on one GPU: memory that is given back, copies, mapping, 100 cycles.

- returned: a trainer's regions (master weights and moments of the shape of Qwen3-0.6B, allocated by
  torch), a reference's weights and an engine's slabs sleep. The free memory of the GPU before and
  after says what came back, and the receipt what is in use besides.
- copies: 4 and 16 GiB in the tensors of such a model are saved and loaded. One copy between pinned
  memory and the GPU of the same size is the peer, and so is torch_memory_saver's own backup.
- mapping: 8 GiB sleep and wake without contents: a slab, what torch allocated in a segment for each
  large tensor, and what it cut from one segment.
- cycles: a region with contents and a slab sleep and wake 100 times. A CUDA graph that reads both
  is replayed after each, and bits are summed. Free memory of the GPU and of the process is compared
  after 10 and after 100 cycles.

    python -m benchmarks.sleep_cycle [--save] [--out FILE] [returned copies mapping cycles]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from benchmarks.record import compared, counted, finish, gpu, gpu_machine, measured
from benchmarks.shapes import write_config
from benchmarks.table import Row
from spmd_rl.model.read import read_spec
from spmd_rl.offload import tms
from spmd_rl.offload.arena import HostArena
from spmd_rl.offload.region import Contents
from spmd_rl.offload.regions import Regions
from spmd_rl.offload.residency import Receipt

PACKAGES = ("torch", "torch_memory_saver")
DEVICE = torch.device("cuda", 0)
GIB, MIB = 1 << 30, 1 << 20
RETURNED, MS_PER_GIB = 0.99, 1.5
COPIED = 0.9  # bar on the rate of a sleep or wake over that of one pinned copy
COPY_TURNS = 5  # behind a first one, which does not count
TURNS, CYCLES, WARM_CYCLES = 20, 100, 10
BACKUP_TURNS = 2


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)}; all without any")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--out", type=Path, help="also write the rows to this file, as JSON")
    options = parser.parse_args()
    rows = [row for name in options.parts or PARTS for row in PARTS[name]()]
    if options.out:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1))
    return finish(__file__, PACKAGES, rows, save=options.save, machine=gpu_machine(), **gpu())


def returned() -> Iterator[Row]:
    parameters = sum(torch.Size(shape).numel() for shape in shapes(int(2.2 * GIB)))
    trainer = Regions("trainer", DEVICE)
    tensors_in(trainer, "master", 4 * parameters, DEVICE)
    tensors_in(trainer, "moments", 8 * parameters, DEVICE)
    yield from _returned("a trainer", trainer)
    reference = Regions("reference", DEVICE)
    tensors_in(reference, "weights", 4 * parameters, DEVICE)
    yield from _returned("a reference", reference)
    engine = Regions("engine", DEVICE)
    engine.slab("weights", "drop", 2 * parameters).bytes.zero_()
    engine.slab("kv", "drop", 8 * GIB).bytes.zero_()
    yield from _returned("an engine", engine)


def _returned(who: str, regions: Regions) -> Iterator[Row]:
    """Yield what comes back, and what stays. The regions sleep from here on.

    They slept once before: the first copies make streams, and pin memory.
    """
    regions.sleep()
    regions.wake()
    torch.cuda.empty_cache()
    receipt = regions.sleep()
    before, after = receipt.free_bytes
    held = sum(receipt.before.values())
    yield measured(f"memory that {who} holds", held / GIB, "GiB")
    share = 100 * (after - before) / held
    yield measured(f"memory that {who} returns", share, "%", at_least=100 * RETURNED)
    for kind, num_bytes in receipt.residue.items():
        yield measured(f"in use while {who} sleeps: {kind}", num_bytes / MIB, "MiB")


def copies() -> Iterator[Row]:
    for size in (4, 16):
        regions = Regions("copies", DEVICE)
        name = f"{size} GiB in {len(tensors_in(regions, 'master', size * GIB, DEVICE))} tensors"
        began = time.perf_counter()
        regions.reserve_saves()
        reserved_s = time.perf_counter() - began
        yield measured(f"{size} GiB of host memory: touched and pinned, once", reserved_s, "s")
        saves, loads = [], []
        for _ in range(1 + COPY_TURNS):
            regions.note_change("master")
            saves.append(timed(regions.sleep))
            loads.append(timed(regions.wake))
        regions.sleep()  # its memory makes room
        plain, backup = _plain(size * GIB), _backup(size * GIB)
        for what, calls, peer, theirs in zip(
            ("saved", "loaded"), (saves, loads), plain, backup, strict=True
        ):
            rate = statistics.median(receipt_rate(receipt) for receipt, _ in calls[1:])
            whole = size * GIB / statistics.median(whole_s for _, whole_s in calls[1:]) / 1e9
            yield compared(
                f"{name}: {what}",
                rate,
                "GB/s",
                peer="one pinned copy",
                peer_value=peer,
                at_least=COPIED,
            )
            yield compared(
                f"{name}: {what}, the whole call",
                whole,
                "GB/s",
                peer="torch_memory_saver 0.0.10 with its backup",
                peer_value=theirs,
            )


def _plain(num_bytes: int) -> tuple[float, float]:
    """Return the rates of one copy to pinned memory and back, in GB/s."""
    host = HostArena(DEVICE).reserve(num_bytes)
    own = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
    return _rate(host, own), _rate(own, host)


def _rate(target: Tensor, source: Tensor) -> float:
    """Return the median rate of a copy, in GB/s."""
    return statistics.median([copy_rate(target, source) for _ in range(1 + COPY_TURNS)][1:])


def _backup(num_bytes: int) -> tuple[float, float]:
    """Return the rates of torch_memory_saver with its own backup, by whole calls, in GB/s.

    The first cycle allocates its pinned memory and is left out.
    """
    saver, tag = tms._saver(), f"backup of {num_bytes}"
    with saver.region(tag=tag, enable_cpu_backup=True):
        made = [torch.empty(shape, device=DEVICE) for shape in shapes(num_bytes)]
    outs, backs = [], []
    for _ in range(1 + BACKUP_TURNS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        saver.pause(tag)
        paused = time.perf_counter()
        saver.resume(tag)
        outs.append(num_bytes / (paused - began) / 1e9)
        backs.append(num_bytes / (time.perf_counter() - paused) / 1e9)
    saver.pause(tag)  # its memory makes room
    del made
    return statistics.median(outs[1:]), statistics.median(backs[1:])


def mapping() -> Iterator[Row]:
    size = 8
    regions = Regions("mapping", DEVICE)
    regions.slab("slab", "drop", size * GIB)
    kept = [
        tensors_in(regions, tag, size * GIB, DEVICE, "drop", as_one=tag == "one")
        for tag in ("several", "one")
    ]
    cases = {
        "slab": "a slab",
        "several": f"{len(kept[0])} tensors",
        "one": f"{len(kept[1])} tensors cut from one segment",
    }
    for tag, what in cases.items():
        sleeps, wakes = [], []
        for _ in range(1 + TURNS):
            sleeps.append(timed(partial(regions.sleep, [tag]))[1])
            wakes.append(timed(partial(regions.wake, [tag]))[1])
        for name, times in (("sleep", sleeps[1:]), ("wake", wakes[1:])):
            each = [seconds * 1e3 / size for seconds in times]
            named = f"{name} of {size} GiB, {what}"
            yield measured(named, statistics.median(each), "ms/GiB", at_most=MS_PER_GIB)
            yield measured(f"{named}, longest of {TURNS}", max(each), "ms/GiB")
    regions.sleep()


def cycles() -> Iterator[Row]:
    regions = Regions("cycles", DEVICE)
    saved = tensors_in(regions, "master", GIB, DEVICE)
    slab = regions.slab("kv", "drop", GIB).bytes.view(torch.float32)
    slab.fill_(1.0)
    out = torch.zeros(2, device=DEVICE)

    def work() -> None:
        out[0] = saved[-1].sum() + saved[1].sum()
        out[1] = slab[: 1 << 20].sum()

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    expected, digest = out.clone(), bit_sums(saved)
    replayed, digests = [], []
    used: list[tuple[int, int]] = []
    for cycle in range(CYCLES):
        regions.note_change("master")
        regions.sleep()
        regions.wake()
        slab.fill_(1.0)
        out.zero_()
        graph.replay()
        replayed.append(torch.equal(out, expected))
        digests.append(torch.equal(bit_sums(saved), digest))
        if cycle + 1 in (WARM_CYCLES, CYCLES):
            torch.cuda.empty_cache()
            used.append((torch.cuda.mem_get_info(DEVICE)[0], resident_bytes()))
    yield counted("cycles after which all bits are the same", digests)
    yield counted("cycles after which a CUDA graph computes the same", replayed)
    (gpu_before, host_before), (gpu_after, host_after) = used
    rest = CYCLES - WARM_CYCLES
    growth = (gpu_before - gpu_after) / MIB
    yield measured(f"growth on the GPU over {rest} cycles", growth, "MiB", at_most=0)
    growth = (host_after - host_before) / MIB
    yield measured(f"growth of the process over {rest} cycles", growth, "MiB", at_most=16)
    regions.sleep()


def bit_sums(tensors: list[Tensor]) -> Tensor:
    """Return the sum of each tensor's bits, as words of 32."""
    return torch.stack([tensor.view(torch.int32).sum(dtype=torch.int64) for tensor in tensors])


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def shapes(num_bytes: int) -> list[tuple[int, ...]]:
    """Return the shapes of Qwen3-0.6B's parameters, repeated until they are `num_bytes` in fp32."""
    with tempfile.TemporaryDirectory() as folder:
        write_config("0.6B", Path(folder))
        spec = read_spec(folder)
    model = list(spec.parameter_shapes().values())
    chosen: list[tuple[int, ...]] = []
    left = num_bytes // 4
    while left > 0:
        for shape in model:
            size = torch.Size(shape).numel()
            if size > left:
                chosen.append((left,))
                return chosen
            chosen.append(shape)
            left -= size
            if not left:
                break
    return chosen


def tensors_in(
    regions: Regions,
    tag: str,
    num_bytes: int,
    device: torch.device,
    contents: Contents = "save",
    as_one: bool = False,
) -> list[Tensor]:
    """Make a region of random tensors. `as_one` says to cut them from one segment."""
    region = regions.torch_region(tag, contents)
    sizes = shapes(num_bytes)
    with region.allocating(num_bytes + 512 * len(sizes) if as_one else 0):
        made = [torch.empty(shape, device=device) for shape in sizes]
    for tensor in made:
        tensor.normal_()
    region.hold(lambda: made)
    return made


def timed(call: Callable[[], Receipt]) -> tuple[Receipt, float]:
    """Return the receipt of a sleep or wake, and the seconds of the whole call."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    receipt = call()
    return receipt, time.perf_counter() - began


def receipt_rate(receipt: Receipt) -> float:
    """Return the rate of the copies of a sleep or wake, in GB/s."""
    return receipt.copied_bytes / receipt.copy_s / 1e9


def copy_rate(target: Tensor, source: Tensor) -> float:
    """Return the rate of one copy between pinned memory and the GPU, in GB/s."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return source.nbytes / (time.perf_counter() - began) / 1e9


PARTS = {"returned": returned, "copies": copies, "mapping": mapping, "cycles": cycles}

if __name__ == "__main__":
    sys.exit(main())
