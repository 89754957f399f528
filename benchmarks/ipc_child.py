"""The child of `benchmarks/ipc.py`: the process that generates, as far as weights go.

    python -m benchmarks.ipc_child FD KIND DEVICE MODEL [GIB]

It maps slabs, copies pushes out of them into parameters of its own, and times both. KIND says how
memory is shared: "vmm" and "memfd" as the package does, "legacy" by cuIpcGetMemHandle.
"""

from __future__ import annotations

import ctypes
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.shapes import write_config
from spmd_rl.offload import vmm
from spmd_rl.weights.plan.layout import Box, Dims
from spmd_rl.weights.slab.peer_socket import PeerMessage, PeerSocket, PortionEntry
from spmd_rl.weights.slab.portion_reader import PortionReader
from spmd_rl.weights.slab.slab import MappedSlab

WARM_UPS, TURNS = 3, 10
DEADLINE_S = 120.0
BF16_BYTES = 2
HANDLE_BYTES = 64


class Order(PeerMessage, frozen=True):
    """What the child is to do next."""

    name: str


class LegacyHandle(PeerMessage, frozen=True):
    """A handle of cudaMalloc's memory."""

    handle: bytes
    num_bytes: int


class Figures(PeerMessage, frozen=True):
    """What the child measured."""

    values: dict[str, float]


EXTRA = (Order, LegacyHandle, Figures)


class IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class LegacyMemory:
    """Memory of cuMemAlloc that another process opens by a handle, used as `ExportedMemory` is."""

    def __init__(self, address: int, num_bytes: int, device: torch.device, release: str) -> None:
        self.bytes = vmm.bytes_at(address, num_bytes, device)
        self._address = ctypes.c_uint64(address)
        self._release = release

    @classmethod
    def create(cls, num_bytes: int, device: torch.device) -> LegacyMemory:
        address = ctypes.c_uint64()
        vmm.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return cls(address.value, num_bytes, device, "cuMemFree_v2")

    @classmethod
    def open(cls, message: LegacyHandle, device: torch.device) -> LegacyMemory:
        address, handle = ctypes.c_uint64(), IpcHandle.from_buffer_copy(message.handle)
        lazy_peer_access = ctypes.c_uint(1)
        vmm.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, lazy_peer_access)
        return cls(address.value, message.num_bytes, device, "cuIpcCloseMemHandle")

    def handle(self) -> LegacyHandle:
        handle = IpcHandle()
        vmm.call("cuIpcGetMemHandle", ctypes.byref(handle), self._address)
        return LegacyHandle(bytes(handle.reserved), self.bytes.numel())

    def close(self) -> None:
        torch.cuda.synchronize()
        vmm.call(self._release, self._address)


def shapes(model: str, gib: float | None) -> dict[str, Dims]:
    """Return the parameters of a Qwen3. With `gib`, repeat them until they fill that in bf16."""
    with tempfile.TemporaryDirectory() as folder:
        of_model = write_config(model, Path(folder)).parameter_shapes()
    if gib is None:
        return {name: tuple(shape) for name, shape in of_model.items()}
    found: dict[str, Dims] = {}
    left = gib * (1 << 30)
    for number, (name, shape) in enumerate(cycle(reversed(of_model.items()))):
        num_bytes = BF16_BYTES * Box(shape, shape).num_elements
        if num_bytes > left:
            return found
        found[f"{name}.{number}"] = tuple(shape)
        left -= num_bytes
    raise AssertionError("a cycle does not end")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(do: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    do()
    synchronize(device)
    return time.perf_counter() - began


def copy_s(target: Tensor, source: Tensor) -> float:
    times = [seconds(lambda: target.copy_(source), target.device) for _ in range(WARM_UPS + TURNS)]
    return statistics.median(times[WARM_UPS:])


def checksum(tensors: dict[str, Tensor]) -> float:
    sums = (int(tensor.view(torch.int16).sum(dtype=torch.int64)) for tensor in tensors.values())
    return float(sum(number * one for number, one in enumerate(sums, 1)) % (1 << 50))


def part(tensor: Tensor, box: Box) -> Tensor:
    """Return a box of a whole tensor."""
    return tensor[box.within(Box((0,) * tensor.ndim, tuple(tensor.shape)))]


class Child:
    """The process that generates: it maps slabs, and copies pushes into its parameters."""

    def __init__(self, peer: PeerSocket, all_shapes: dict[str, Dims], device: torch.device) -> None:
        self.peer = peer
        self.device = device
        self.parameters = new_parameters(all_shapes, device)
        self.mapped: MappedSlab | None = None
        self.reader: PortionReader | None = None

    def serve(self) -> None:
        """Follow orders until the order to leave."""
        orders = {"open": self.open, "copy": self.copy, "push": self.push, "sum": self.sum}
        orders["close"] = self.close
        self.peer.send(Figures({}))
        while (order := self.peer.receive(DEADLINE_S)) != Order("leave"):
            self.peer.send(Figures(orders[order.name]()))

    def open(self) -> dict[str, float]:
        began = time.perf_counter()
        self.mapped = MappedSlab.receive(self.peer, self.device)
        self.mapped.memory[:1].clone()
        synchronize(self.device)
        return {"open_s": time.perf_counter() - began}

    def copy(self) -> dict[str, float]:
        own, other = torch.empty_like(self.mapped.memory), torch.empty_like(self.mapped.memory)
        return {"slab_s": copy_s(own, self.mapped.memory), "own_s": copy_s(own, other)}

    def push(self) -> dict[str, float]:
        self.reader = self.reader or PortionReader(self.mapped, self.peer, DEADLINE_S)
        for portion in self.reader:
            portion.copy(self.target)
            self.reader.ack(portion)
        return {}

    def target(self, entry: PortionEntry) -> Tensor:
        return part(self.parameters[entry.name], entry.box)

    def sum(self) -> dict[str, float]:
        return {"sum": checksum(self.parameters)}

    def close(self) -> dict[str, float]:
        self.reader = None
        self.mapped.close()
        return {}


class LegacyChild(Child):
    """The same over legacy handles."""

    def open(self) -> dict[str, float]:
        began = time.perf_counter()
        memory = LegacyMemory.open(self.peer.receive(DEADLINE_S), self.device)
        self.mapped = MappedSlab(memory, 1)
        self.mapped.memory[:1].clone()
        synchronize(self.device)
        return {"open_s": time.perf_counter() - began}


CHILDREN = {"vmm": Child, "memfd": Child, "legacy": LegacyChild}


def new_parameters(all_shapes: dict[str, Dims], device: torch.device) -> dict[str, Tensor]:
    return {
        name: torch.zeros(shape, device=device, dtype=torch.bfloat16)
        for name, shape in all_shapes.items()
    }


def main() -> None:
    fd, kind, device, model, *gib = sys.argv[1:]
    torch.zeros(1, device=device)  # starts CUDA before the owner measures
    peer = PeerSocket(socket.socket(fileno=int(fd)), "the owner", EXTRA)
    all_shapes = shapes(model, float(gib[0]) if gib else None)
    CHILDREN[kind](peer, all_shapes, torch.device(device)).serve()


if __name__ == "__main__":
    main()
