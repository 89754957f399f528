"""Kernels of pushes and views of exported memory: CuPy beside Triton and our own code.

The same CUDA C++ kernels that CuPy compiles (NVRTC) and the Triton kernels that pushes use: digests
of boxes, and copies of many tensors. Results are compared bit for bit. A start is a fresh process
that has imported torch and Triton, with empty or with warm caches of compiled kernels; it launches
what one push needs. Views are tensors over an address range, as a slab makes them.

    python -m benchmarks.cupy_beside_triton [--shape 4B] [--save]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.cupy_kernels import CupyCopies, CupyDigests, view_of
from benchmarks.record import compared, finish, gpu, gpu_machine, measured
from benchmarks.shapes import write_config
from benchmarks.table import Row
from spmd_rl.kernels.runtime.copy_triton import BufferCopies, MasterCopies
from spmd_rl.kernels.runtime.digest_triton import RowDigests, Rows
from spmd_rl.kernels.runtime.interleaved_timing import seconds
from spmd_rl.offload.vmm import AddressRange, bytes_at

PACKAGES = ("torch", "triton", "cupy-cuda13x")
BF16, FP32 = torch.bfloat16, torch.float32
CACHES = ("TRITON_CACHE_DIR", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH")
TURNS, STARTS, VIEWS = 25, 3, 1000
WAYS = ("triton", "cupy")
Run = Callable[[], object]


def rows_of(tensors: Sequence[Tensor], columns: float = 1.0) -> list[Rows]:
    """Return a box for each tensor: all of it, or the first columns of each row."""
    boxes = []
    for box, tensor in enumerate(tensors):
        width = tensor.shape[-1]
        size = int(width * columns)
        if size == width:
            boxes.append(Rows(tensor.data_ptr(), 1, tensor.numel(), 0, 0, 0, box))
        else:
            count = tensor.numel() // width
            boxes.append(Rows(tensor.data_ptr(), count, size, width, 0, width, box))
    return boxes


def digests(way: str, rows: list[Rows], dtype: torch.dtype, sums: Tensor) -> Run:
    made = {"triton": RowDigests, "cupy": CupyDigests}[way](rows, dtype, BF16, sums.device)
    return lambda: made.add_to(sums)


def packing(way: str, tensors: list[Tensor], buffer: Tensor) -> Run:
    """Return a run that copies `tensors` to `buffer`, one after the other, as bfloat16."""
    ends = np.cumsum([-(-tensor.numel() * 2 // 16) * 16 for tensor in tensors])
    starts = [0, *ends[:-1].tolist()]
    if way == "cupy":
        targets = [
            buffer[start : start + tensor.numel() * 2].view(BF16)
            for start, tensor in zip(starts, tensors, strict=True)
        ]
        return CupyCopies(list(zip(targets, tensors, strict=True))).run
    made = BufferCopies(tensors, starts, BF16, to_buffer=True, max_programs=1 << 20)
    return lambda: made.run(buffer)


def casts(way: str, weights: list[Tensor], masters: list[Tensor]) -> Run:
    pairs = list(zip(weights, masters, strict=True))
    return {"triton": MasterCopies, "cupy": CupyCopies}[way](pairs).run


def start(way: str) -> None:
    """Print the seconds that the first launches of one push take in this process."""
    device = torch.device("cuda", 0)
    masters = [torch.randn(512, 512, device=device) for _ in range(4)]
    weights = [torch.empty_like(one, dtype=BF16) for one in masters]
    sums = torch.zeros(4, dtype=torch.int64, device=device)
    buffer = torch.empty(4 * 512 * 512 * 2, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    began = time.perf_counter()
    if way == "cupy":
        import cupy  # noqa: F401 - its import is measured
    imported = time.perf_counter() - began
    for run in (
        digests(way, rows_of(weights), BF16, sums),
        digests(way, rows_of(weights, 0.5), BF16, sums),
        digests(way, rows_of(masters), FP32, sums),
        casts(way, weights, masters),
        packing(way, weights, buffer),
    ):
        run()
    torch.cuda.synchronize()
    print(json.dumps([time.perf_counter() - began, imported]))


def started(way: str, caches: Path) -> tuple[float, float]:
    settings = {name: str(caches / name) for name in CACHES}
    command = [sys.executable, "-m", "benchmarks.cupy_beside_triton", "--start", way]
    out = subprocess.run(command, env=os.environ | settings, capture_output=True, check=True)
    total, imported = json.loads(out.stdout.splitlines()[-1])
    return total, imported


def starts() -> Iterator[Row]:
    found: dict[str, list[tuple[float, ...]]] = {}
    for _ in range(STARTS):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                for caches in ("empty", "warm"):
                    found.setdefault(f"{way} {caches}", []).append(started(way, Path(folder)))
    for caches in ("empty", "warm"):
        values = {way: [one[0] for one in found[f"{way} {caches}"]] for way in WAYS}
        yield compared(
            f"first launches of a push, {caches} caches: CuPy",
            statistics.median(values["cupy"]),
            "s",
            peer="Triton",
            peer_value=statistics.median(values["triton"]),
        )
    imports = [one[1] for one in found["cupy warm"]]
    yield measured("import of CuPy, warm", statistics.median(imports), "s")


def launches(shape: str) -> Iterator[Row]:
    device = torch.device("cuda", 0)
    with tempfile.TemporaryDirectory() as folder:
        shapes = write_config(shape, Path(folder)).parameter_shapes().values()
    masters = [torch.randn(one, device=device) for one in shapes]
    weights = [one.to(BF16) for one in masters]
    num_bytes = sum(one.numel() * 2 for one in weights)
    buffer = torch.empty(num_bytes + 16 * len(weights), dtype=torch.uint8, device=device)
    cases: dict[str, tuple[int, Callable[[str], tuple[Run, Callable[[], Tensor]]]]] = {}

    def of_digests(rows: list[Rows], dtype: torch.dtype) -> Callable[[str], tuple[Run, Run]]:
        def make(way: str) -> tuple[Run, Run]:
            sums = torch.zeros(len(rows), dtype=torch.int64, device=device)
            return digests(way, rows, dtype, sums), lambda: sums.clone()

        return make

    matrices = [one for one in weights if one.dim() == 2]
    half = num_bytes // 2
    cases["digests of whole tensors"] = num_bytes, of_digests(rows_of(weights), BF16)
    cases["digests of half of the columns"] = half, of_digests(rows_of(matrices, 0.5), BF16)
    cases["digests of masters"] = 2 * num_bytes, of_digests(rows_of(masters), FP32)

    def cast(way: str) -> tuple[Run, Run]:
        targets = [torch.empty_like(one) for one in weights]
        return casts(way, targets, masters), lambda: torch.cat([t.flatten() for t in targets])

    def pack(way: str) -> tuple[Run, Run]:
        buffer.fill_(0)
        return packing(way, weights, buffer), lambda: buffer.clone()

    cases["casts of masters"] = 3 * num_bytes, cast
    cases["packing"] = 2 * num_bytes, pack
    for what, (moved, make) in cases.items():
        results = []
        for way in WAYS:
            run, result = make(way)
            run()
            results.append(result())
            del run
        unequal = int((results[0] != results[1]).sum())
        yield measured(f"{shape}, {what}: unequal results", unequal, "elements", at_most=0)
        assert bool(results[0].any())
        del results
        runs = [make(way)[0] for way in WAYS]
        of_triton, of_cupy = seconds(runs, TURNS, 3)
        yield compared(
            f"{shape}, {what}: CuPy",
            moved / of_cupy / 1e9,
            "GB/s",
            peer="Triton",
            peer_value=moved / of_triton / 1e9,
        )
        hosts = [host_microseconds(run) for run in runs]
        yield compared(
            f"{shape}, {what}, host time of a launch: CuPy",
            hosts[1],
            "us",
            peer="Triton",
            peer_value=hosts[0],
        )
        del runs
        torch.cuda.empty_cache()


def host_microseconds(run: Run) -> float:
    times = []
    for _ in range(TURNS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def views() -> Iterator[Row]:
    """Time a view of exported memory, and check that it sees what the other one wrote."""
    memory = AddressRange(1 << 21, torch.device("cuda", 0), exportable=True)
    memory.map(memory.create())
    ours = bytes_at(memory.address, 1 << 21, memory.device)
    theirs = view_of(memory.address, 1 << 21, memory.device)
    ours.fill_(7)
    yield measured("views: unequal bytes", int((theirs != 7).sum()), "bytes", at_most=0)
    times = []
    for make in (bytes_at, view_of):
        began = time.perf_counter()
        for _ in range(VIEWS):
            make(memory.address, 1 << 21, memory.device)
        times.append((time.perf_counter() - began) / VIEWS * 1e6)
    yield compared(
        "a view of exported memory: CuPy", times[1], "us", peer="our own", peer_value=times[0]
    )
    memory.unmap()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="4B")
    parser.add_argument("--start", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if options.start:
        start(options.start)
        return 0
    rows = [*views(), *launches(options.shape), *starts()]
    return finish(__file__, PACKAGES, rows, save=options.save, machine=gpu_machine(), **gpu())


if __name__ == "__main__":
    sys.exit(main())
