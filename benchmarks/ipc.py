"""Weights from a rank to the process that generates on its GPU: time of a push through a slab.

    python -m benchmarks.ipc [--model 0.6B | --gib N] [--save] [--out FILE]

A push gathers fp32 masters into portions and casts them to bf16; the other process copies the
portions out and acknowledges them. It is timed on the host, from the first slot to the last
acknowledgement. The floor is the same work within one process: the same portions are filled from
the same masters, and copied out into bf16 parameters, all queued on one stream that is waited for
once. So floor and push both read 4 bytes and write 2 for each parameter, then read 2 and write 2.
Both use the copies that the runtime prepares, and the push is that of the runtime's executor.

Two ways to share the memory take turns with the floor: a file descriptor of VMM memory, which is
what the package uses, and a legacy handle (cuIpcGetMemHandle), which is here for comparison alone.
On a CPU there is the memfd alone.

The two processes take turns on the GPU. Larger portions have fewer turns and messages, and occupy
more memory: a slab has two portions.
"""

from __future__ import annotations

import argparse
import ctypes
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from benchmarks.ipc_child import (
    BF16_BYTES,
    DEADLINE_S,
    EXTRA,
    TURNS,
    WARM_UPS,
    Figures,
    LegacyMemory,
    Order,
    checksum,
    new_parameters,
    part,
    seconds,
    shapes,
)
from benchmarks.record import compared, counted, finish, gpu, gpu_machine, measured
from benchmarks.table import Row
from spmd_rl.offload import vmm
from spmd_rl.weights.copies import Copies
from spmd_rl.weights.ends import LocalEnds
from spmd_rl.weights.executors import Executor
from spmd_rl.weights.local_tensors import LocalTensors
from spmd_rl.weights.plan.layout import Box, Dims, Layout, Piece
from spmd_rl.weights.plan.moves import plan_moves
from spmd_rl.weights.slab.peer_socket import PeerSocket
from spmd_rl.weights.slab.portion_writer import PortionWriter
from spmd_rl.weights.slab.portions import cut_box
from spmd_rl.weights.slab.slab import Slab
from spmd_rl.weights.tensor_ends import TensorSource

PACKAGES = ("torch", "msgspec")
PORTIONS_MIB = (8, 32, 64, 128, 256, 512)
BAR = 1.3
MIB = 1 << 20


class Owner:
    """The rank: masters, parameters of its own for the floor, and a child."""

    def __init__(self, kind: str, options: argparse.Namespace) -> None:
        self.kind = kind
        self.device = torch.device(options.device)
        ours, theirs = socket.socketpair()
        words = [str(theirs.fileno()), kind, options.device, options.model]
        words += [] if options.gib is None else [str(options.gib)]
        command = [sys.executable, "-m", "benchmarks.ipc_child", *words]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self.peer = PeerSocket(ours, f"the child (pid {self.process.pid})", EXTRA)
        self.figures()

    def figures(self) -> dict[str, float]:
        message = self.peer.receive(DEADLINE_S)
        assert isinstance(message, Figures)
        return message.values

    def ask(self, order: str) -> dict[str, float]:
        self.peer.send(Order(order))
        return self.figures()

    def share(self, num_bytes: int) -> tuple[Slab, float]:
        """Return a new slab that the child has mapped, and how long the child took."""
        if self.kind != "legacy":
            slab = Slab.create(num_bytes, self.device)
            self.peer.send(Order("open"))
            slab.send(self.peer)
            return slab, self.figures()["open_s"]
        memory = LegacyMemory.create(num_bytes, self.device)
        self.peer.send(Order("open"))
        self.peer.send(memory.handle())
        return Slab(memory, 1), self.figures()["open_s"]

    def leave(self) -> None:
        self.peer.send(Order("leave"))
        self.process.wait(DEADLINE_S)
        self.peer.close()


class SlabSink:
    """The sink of a push through a slab, without an engine."""

    def __init__(self, writer: PortionWriter, shapes: dict[str, Dims]) -> None:
        self.writer = writer
        self.shapes = shapes
        self.in_flush_s = 0.0

    def layout(self, rank: int) -> Layout:
        return Layout(
            rank,
            tuple(
                Piece(name, shape, "bfloat16", whole(shape)) for name, shape in self.shapes.items()
            ),
        )

    def share(self, name: str, box: Box, memory: Tensor) -> bool:
        return False

    def open(self) -> None:
        self.in_flush_s = 0.0

    def slot(self, name: str, box: Box) -> Tensor | None:
        if BF16_BYTES * box.num_elements > self.writer.max_bytes:
            return None
        return self.writer.slot(name, box, self.shapes[name], "bfloat16")

    def cut(self, name: str, box: Box) -> Iterable[Box]:
        return cut_box(box, BF16_BYTES, self.writer.max_bytes)

    def flush(self) -> int | None:
        began = time.perf_counter()
        slots = self.writer.flush()
        self.in_flush_s += time.perf_counter() - began
        return slots

    def repeat(self, slots: int) -> bool:
        return self.writer.repeat(slots)

    def digest(self) -> dict[tuple[str, Box], int]:
        return {}

    def commit(self, version: int) -> None:
        self.writer.finish()


class Push:
    """Pushes over one slab."""

    def __init__(self, owner: Owner, slab: Slab, masters: dict[str, Tensor]) -> None:
        self.owner = owner
        source = TensorSource(LocalTensors.whole(masters).items())
        writer = PortionWriter(slab, owner.peer, DEADLINE_S)
        self.sink = SlabSink(writer, {name: tuple(one.shape) for name, one in masters.items()})
        ends = LocalEnds(0, source, self.sink, owner.device)
        moves = plan_moves([source.layout(0)], [self.sink.layout(0)], None, 0).moves
        self.executor = Executor(moves, ends)

    def run(self) -> None:
        """Push once, to a child that was told to read a push."""
        self.sink.open()
        self.executor.run(None)
        self.sink.commit(0)

    def run_s(self) -> float:
        """Return how long a push takes."""
        self.owner.peer.send(Order("push"))
        push_s = seconds(self.run, self.owner.device)
        self.owner.figures()
        return push_s


class Floor:
    """The work of a push within one process."""

    def __init__(
        self, masters: dict[str, Tensor], parameters: dict[str, Tensor], portion_bytes: int
    ) -> None:
        device = next(iter(masters.values())).device
        halves = torch.empty(2, portion_bytes // BF16_BYTES, dtype=torch.bfloat16, device=device)
        portions: list[tuple[list[Tensor], list[Tensor], list[Tensor]]] = [([], [], [])]
        used = 0
        for name, tensor in masters.items():
            for box in cut_box(whole(tuple(tensor.shape)), BF16_BYTES, portion_bytes):
                source = part(tensor, box)
                if used + source.numel() > halves.shape[1]:
                    portions.append(([], [], []))
                    used = 0
                half = halves[(len(portions) - 1) % 2]
                slot = half[used : used + source.numel()].view(source.shape)
                for to, one in zip(
                    portions[-1], (source, slot, part(parameters[name], box)), strict=True
                ):
                    to.append(one)
                used += -(-source.numel() // 128) * 128
        self.copies = [
            copies
            for sources, slots, targets in portions
            for copies in (Copies(slots, sources), Copies(targets, slots))
        ]

    def run(self) -> None:
        for copies in self.copies:
            copies.run()


def whole(shape: Dims) -> Box:
    return Box((0,) * len(shape), shape)


def push_rows(
    owner: Owner, masters: dict[str, Tensor], options: argparse.Namespace
) -> Iterator[Row]:
    """Yield the time of a push for each size of portion; the fastest bears the bar."""
    parameters = new_parameters({name: tuple(t.shape) for name, t in masters.items()}, owner.device)
    found, right = {}, []
    for mib in options.portions:
        slab, _ = owner.share(2 * mib * MIB)
        push, floor = Push(owner, slab, masters), Floor(masters, parameters, mib * MIB)
        times: dict[str, list[float]] = {"push": [], "floor": [], "flush": []}
        for _ in range(WARM_UPS + TURNS):
            times["floor"].append(seconds(floor.run, owner.device))
            times["push"].append(push.run_s())
            times["flush"].append(push.sink.in_flush_s)
        found[mib] = {what: statistics.median(each[WARM_UPS:]) for what, each in times.items()}
        right.append(owner.ask("sum")["sum"] == checksum(parameters))
        owner.ask("close")
        del push, floor
        slab.close()
    best = min(found, key=lambda mib: found[mib]["push"])
    for mib, times in found.items():
        bar = BAR if mib == best and owner.kind != "legacy" else None
        yield compared(
            f"{owner.kind}: push, buckets of {mib} MiB" + (", the fastest" if mib == best else ""),
            times["push"] * 1e3,
            "ms",
            peer="within one process",
            peer_value=times["floor"] * 1e3,
            at_most=bar,
        )
        yield measured(f"{owner.kind}: of this in flush, {mib} MiB", times["flush"] * 1e3, "ms")
    yield counted(f"{owner.kind}: the child holds the owner's bits", right)


def share_rows(owner: Owner) -> Iterator[Row]:
    """Yield how fast the child opens a slab of 512 MiB, and reads it."""
    num_bytes = 512 * MIB if owner.device.type == "cuda" else 32 * MIB
    opened = []
    for _ in range(5):
        slab, open_s = owner.share(num_bytes)
        opened.append(open_s)
        figures = owner.ask("copy")
        owner.ask("close")
        slab.close()
    yield measured(f"{owner.kind}: first opening", opened[0] * 1e3, "ms")
    yield measured(f"{owner.kind}: later openings", statistics.median(opened[1:]) * 1e3, "ms")
    yield compared(
        f"{owner.kind}: child's copy out of the slab",
        2 * num_bytes / figures["slab_s"] / 1e12,
        "TB/s",
        peer="out of its own memory",
        peer_value=2 * num_bytes / figures["own_s"] / 1e12,
    )


def sleep_rows(owner: Owner) -> Iterator[Row]:
    """Yield what the owner gets back when it frees a slab that the child has open."""
    num_bytes = 512 * MIB
    slab, _ = owner.share(num_bytes)
    before = torch.cuda.mem_get_info()[0]
    slab.close()
    freed = torch.cuda.mem_get_info()[0] - before
    yield measured(f"{owner.kind}: back while the child has it open, of 512", freed / MIB, "MiB")
    owner.ask("close")
    freed = torch.cuda.mem_get_info()[0] - before
    yield measured(f"{owner.kind}: back after the child closed it, of 512", freed / MIB, "MiB")


def remap_rows(owner: Owner, masters: dict[str, Tensor]) -> Iterator[Row]:
    """Yield how long the owner takes to unmap VMM memory and map it again, and whether the child
    still sees its writes.
    """
    slab, _ = owner.share(512 * MIB)
    addresses = slab._memory._owner
    assert isinstance(addresses, vmm.AddressRange)
    handle = ctypes.c_uint64()
    vmm.call(
        "cuMemRetainAllocationHandle", ctypes.byref(handle), ctypes.c_void_p(addresses.address)
    )
    unmap_s = seconds(addresses.unmap, owner.device)
    map_s = seconds(lambda: addresses.map(handle.value), owner.device)
    yield measured("vmm: owner unmaps 512 MiB", unmap_s * 1e3, "ms")
    yield measured("vmm: owner maps them again", map_s * 1e3, "ms")
    for tensor in masters.values():
        tensor.mul_(-0.5)
    Push(owner, slab, masters).run_s()
    expected = checksum({name: tensor.bfloat16() for name, tensor in masters.items()})
    yield counted("vmm: the child reads on after that", [owner.ask("sum")["sum"] == expected])
    owner.ask("close")
    slab.close()


def measure(options: argparse.Namespace) -> Iterator[Row]:
    device = torch.device(options.device)
    made = torch.Generator(device).manual_seed(0)
    masters = {
        name: torch.randn(shape, device=device, generator=made)
        for name, shape in shapes(options.model, options.gib).items()
    }
    num_bytes = BF16_BYTES * sum(tensor.numel() for tensor in masters.values())
    yield measured("bytes of a push in bf16", num_bytes / 1e9, "GB")
    for kind in ("vmm", "legacy") if device.type == "cuda" else ("memfd",):
        owner = Owner(kind, options)
        yield from share_rows(owner)
        yield from push_rows(owner, masters, options)
        if device.type == "cuda":
            yield from sleep_rows(owner)
        if kind == "vmm":
            yield from remap_rows(owner, masters)
        owner.leave()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="0.6B", choices=("0.6B", "4B", "8B"))
    parser.add_argument("--gib", type=float, help="GiB of bf16 in place of the model's")
    parser.add_argument("--portions", type=int, nargs="+", default=PORTIONS_MIB, help="in MiB")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--out", type=Path, help="a file for the rows as JSON")
    return parser.parse_args()


def main() -> int:
    options = parse()
    device = torch.device(options.device)
    rows = list(measure(options))
    if options.out is not None:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(rows)))
    if device.type == "cpu":
        return finish(__file__, PACKAGES, rows, save=options.save)
    return finish(__file__, PACKAGES, rows, save=options.save, machine=gpu_machine(), **gpu())


if __name__ == "__main__":
    sys.exit(main())
