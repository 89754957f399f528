"""Sleep and wake of regions on one GPU: memory that is given back, copies, mapping, 100 cycles.

- returned: a trainer's regions (master weights and moments of the shape of Qwen3-0.6B, allocated by
  torch), a reference's weights and an engine's slabs sleep. The free memory of the GPU before and
  after says what came back.
- copies: 4 and 16 GiB in the tensors of such a model are saved and loaded. One copy between pinned
  memory and the GPU of the same size is the peer, and so is torch_memory_saver's own backup.
- mapping: a slab and a torch region of 8 GiB sleep and wake without contents.
- cycles: a region with contents and a slab sleep and wake 100 times. A CUDA graph that reads both
  is replayed after each, and contents are summed. Free memory of the GPU and of the process is
  compared after 10 and after 100 cycles.

    python -m benchmarks.sleep_cycle [--save] [returned copies mapping cycles]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.record import compared, counted, finish, gpu, gpu_machine, measured
from benchmarks.shapes import write_config
from benchmarks.table import Row
from spmd_rl.model.spec import ModelSpec
from spmd_rl.offload import tms
from spmd_rl.offload.regions import Regions

PACKAGES = ("torch", "torch_memory_saver")
DEVICE = torch.device("cuda", 0)
GIB = 1 << 30
RETURNED, COPIED, MS_PER_GIB = 0.99, 0.9, 1.5
TURNS, CYCLES, WARM_CYCLES = 20, 100, 10
COPY_TURNS = 5


def main() -> int:
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    rows = [row for name in words or PARTS for row in PARTS[name]()]
    save = "--save" in sys.argv
    return finish(__file__, PACKAGES, rows, save=save, machine=gpu_machine(), **gpu())


def shapes(num_bytes: int) -> list[tuple[int, ...]]:
    """Return the shapes of Qwen3-0.6B's parameters, repeated until they are `num_bytes` in fp32."""
    with tempfile.TemporaryDirectory() as folder:
        write_config("0.6B", Path(folder))
        spec = ModelSpec.from_folder(folder)
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


def tensors_in(regions: Regions, tag: str, num_bytes: int) -> list[Tensor]:
    """Make a region of random tensors that are saved."""
    region = regions.torch_region(tag, "save")
    with region.allocating():
        made = [torch.empty(shape, device=DEVICE) for shape in shapes(num_bytes)]
    for tensor in made:
        tensor.normal_()
    region.hold(lambda: made)
    return made


def returned() -> Iterator[Row]:
    parameters = sum(torch.Size(shape).numel() for shape in shapes(int(2.2 * GIB)))
    cases: dict[str, tuple[str, ...]] = {
        "a trainer": ("master", "moments"),
        "a reference": ("weights",),
    }
    for who, tags in cases.items():
        regions = Regions(f"returned {who}", DEVICE)
        for tag in tags:
            tensors_in(regions, tag, (8 if tag == "moments" else 4) * parameters)
        yield _returned(who, regions)
    regions = Regions("returned engine", DEVICE)
    regions.slab("weights", "drop", 2 * parameters).bytes.zero_()
    regions.slab("kv", "drop", 8 * GIB).bytes.zero_()
    yield _returned("an engine", regions)


def _returned(who: str, regions: Regions) -> Row:
    torch.cuda.empty_cache()
    receipt = regions.sleep()
    before, after = receipt.free_bytes
    held = sum(receipt.before.values())
    print(f"{who}: held {held / GIB:.3f} GiB, residue {receipt.residue}")
    regions.wake()
    share = 100 * (after - before) / held
    return measured(f"memory that {who} returns", share, "%", at_least=100 * RETURNED)


def copies() -> Iterator[Row]:
    for size in (4, 16):
        regions = Regions(f"copies {size}", DEVICE)
        made = tensors_in(regions, "master", size * GIB)
        saves, loads = [], []
        for _ in range(1 + COPY_TURNS):
            regions.note_change("master")
            receipt = regions.sleep()
            saves.append(receipt.copied_bytes / receipt.copy_s / 1e9)
            began = time.perf_counter()
            receipt = regions.wake()
            print(f"{size} GiB: whole wake {time.perf_counter() - began:.3f} s, {receipt}")
            loads.append(receipt.copied_bytes / receipt.copy_s / 1e9)
        out, back = _plain(size * GIB)
        name = f"{size} GiB in {len(made)} tensors"
        del made
        for what, values, plain in (("saved", saves, out), ("loaded", loads, back)):
            yield compared(
                f"{name}: {what}",
                statistics.median(values[1:]),
                "GB/s",
                peer="one pinned copy",
                peer_value=plain,
                at_least=COPIED,
            )
        regions.sleep()  # its memory makes room for the next
        if size == 4:
            yield from _backup(size, statistics.median(saves[1:]), statistics.median(loads[1:]))


def _plain(num_bytes: int) -> tuple[float, float]:
    """Return the rates of one copy to pinned memory and back, in GB/s."""
    from spmd_rl.offload.arena import HostArena

    num_bytes = min(num_bytes, 4 * GIB)
    host = HostArena(DEVICE).reserve(num_bytes)
    own = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
    return _rate(host, own), _rate(own, host)


def _rate(target: Tensor, source: Tensor) -> float:
    """Return the median rate of a copy, in GB/s."""
    times = []
    for _ in range(1 + COPY_TURNS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return source.nbytes / statistics.median(times[1:]) / 1e9


def _backup(size: int, saved: float, loaded: float) -> Iterator[Row]:
    """Yield our rates beside torch_memory_saver's, with its own backup, by whole calls."""
    saver, tag = tms._saver(), "backup"
    with saver.region(tag=tag, enable_cpu_backup=True):
        made = [torch.ones(shape, device=DEVICE) for shape in shapes(size * GIB)]
    outs, backs = [], []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        saver.pause(tag)
        paused = time.perf_counter()
        saver.resume(tag)
        outs.append(size * GIB / (paused - began) / 1e9)
        backs.append(size * GIB / (time.perf_counter() - paused) / 1e9)
    del made
    for what, ours, theirs in (("saved", saved, outs), ("loaded", loaded, backs)):
        yield compared(
            f"{size} GiB: {what}, beside a backup",
            ours,
            "GB/s",
            peer="torch_memory_saver 0.0.10",
            peer_value=statistics.median(theirs),
        )


def mapping() -> Iterator[Row]:
    size = 8
    regions = Regions("mapping", DEVICE)
    regions.slab("slab", "drop", size * GIB)
    region = regions.torch_region("torch", "drop")
    with region.allocating():
        made = [torch.empty(shape, device=DEVICE) for shape in shapes(size * GIB)]
    region.hold(lambda: made)
    for tag, what in (("slab", "a slab"), ("torch", "what torch allocated")):
        sleeps, wakes = [], []
        for _ in range(1 + TURNS):
            began = time.perf_counter()
            regions.sleep([tag])
            between = time.perf_counter()
            regions.wake([tag])
            sleeps.append((between - began) * 1e3 / size)
            wakes.append((time.perf_counter() - between) * 1e3 / size)
        for name, times in (("sleeps", sleeps[1:]), ("wakes", wakes[1:])):
            median = statistics.median(times)
            yield measured(f"{what} of {size} GiB {name}", median, "ms/GiB", at_most=MS_PER_GIB)
            yield measured(f"{what} of {size} GiB {name}, longest", max(times), "ms/GiB")
    regions.sleep()


def cycles() -> Iterator[Row]:
    regions = Regions("cycles", DEVICE)
    saved = tensors_in(regions, "master", GIB)
    slab = regions.slab("kv", "drop", GIB).bytes.view(torch.float32)
    slab.fill_(1.0)
    out = torch.zeros(2, device=DEVICE)

    def work() -> None:
        out[0] = torch.stack([tensor.double().sum() for tensor in saved]).sum()
        out[1] = slab[: 1 << 20].sum()

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    expected, same = out.clone(), []
    used: list[tuple[int, int]] = []
    for cycle in range(CYCLES):
        regions.note_change("master")
        regions.sleep()
        regions.wake()
        slab.fill_(1.0)
        out.zero_()
        graph.replay()
        same.append(torch.equal(out, expected))
        if cycle + 1 in (WARM_CYCLES, CYCLES):
            used.append((torch.cuda.mem_get_info(DEVICE)[0], resident_bytes()))
    yield counted("cycles after which contents and a CUDA graph are the same", same)
    (gpu_before, host_before), (gpu_after, host_after) = used
    rest = CYCLES - WARM_CYCLES
    growth = (gpu_before - gpu_after) / 2**20
    yield measured(f"growth on the GPU over {rest} cycles", growth, "MiB", at_most=0)
    growth = (host_after - host_before) / 2**20
    yield measured(f"growth of the process over {rest} cycles", growth, "MiB", at_most=16)


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


PARTS = {"returned": returned, "copies": copies, "mapping": mapping, "cycles": cycles}

if __name__ == "__main__":
    sys.exit(main())
