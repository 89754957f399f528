"""HostArena: pinned host memory of one rank, where what leaves the GPU waits.

Memory is allocated once for each region: a first touch of pages is slower than a copy from a GPU,
so that allocating at each step would look like slow offload. Pages are touched by several threads
on processors next to the GPU, and are then registered with CUDA. torch's own allocator of pinned
memory is not used, since it rounds sizes up to powers of two.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from spmd_rl.errors import ResidencyError
from spmd_rl.offload.host_limit import host_bytes_left
from spmd_rl.offload.ledger import as_size
from spmd_rl.offload.vmm import pci_name

PCI_DEVICES = Path("/sys/bus/pci/devices")
NUMA_NODES = Path("/sys/devices/system/node")
PORTABLE = 1  # of cudaHostRegister: pinned for all contexts
MAX_THREADS = 8  # that touch pages
TOUCHED_BYTES = 256 << 20  # by one thread at a time


@cache
def rank_arena(device: torch.device, limit_bytes: int = 0) -> HostArena:
    """Return the arena of this process for a device, which all roles of the rank share."""
    return HostArena(device, limit_bytes)


class HostArena:
    """Host memory for what leaves one rank's GPU.

    `limit_bytes` bounds all of it; 0 stands for what cgroup and machine leave at each request.
    `num_bytes` are in use: memory goes back with the last tensor over it.
    """

    def __init__(self, device: torch.device, limit_bytes: int = 0) -> None:
        self._device = device
        self._limit_bytes = limit_bytes
        self.num_bytes = 0

    def reserve(self, num_bytes: int) -> Tensor:
        """Return new host memory as bytes, zero, and pinned where the device is a GPU.

        Blocks: on a GPU, until all pages are touched and pinned, about a second for 10 GiB.
        Raises: ResidencyError before anything is allocated, if it exceeds the limit.
        """
        self._require_room(num_bytes)
        block = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            block.madvise(mmap.MADV_HUGEPAGE)
        array = (ctypes.c_uint8 * len(block)).from_buffer(block)
        memory = torch.frombuffer(array, dtype=torch.uint8)
        address = 0
        if self._device.type == "cuda":
            _touch(memory, self._device)
            _pin(memory)
            address = memory.data_ptr()
        self.num_bytes += num_bytes
        # the array goes before the pages: CUDA lets go of them while they exist
        weakref.finalize(array, self._release, num_bytes, address).atexit = False
        return memory[:num_bytes]

    def _release(self, num_bytes: int, address: int) -> None:
        self.num_bytes -= num_bytes
        if address:
            torch.cuda.cudart().cudaHostUnregister(address)

    def _require_room(self, num_bytes: int) -> None:
        if self._limit_bytes:
            left, source = self._limit_bytes - self.num_bytes, "offload.host_gib"
        else:
            left, source = host_bytes_left(), "the cgroup and the machine"
        if num_bytes > left:
            raise ResidencyError(
                f"{as_size(num_bytes)} of host memory are needed beside {as_size(self.num_bytes)} "
                f"that this rank has for sleeping memory, and {source} leave {as_size(left)}"
            )


def _touch(memory: Tensor, device: torch.device) -> None:
    """Write zeros from threads on the GPU's NUMA node, whose memory a first touch takes."""
    allowed = os.sched_getaffinity(0)
    near = _processors_near(device) & allowed or allowed
    pieces = memory.split(TOUCHED_BYTES)
    with ThreadPoolExecutor(
        min(MAX_THREADS, len(near)), initializer=os.sched_setaffinity, initargs=(0, near)
    ) as threads:
        list(threads.map(torch.Tensor.zero_, pieces))


def _pin(memory: Tensor) -> None:
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), PORTABLE)
    if int(code) != 0:
        raise ResidencyError(
            f"CUDA cannot pin {as_size(memory.numel())} of host memory: error {int(code)}"
        )


def _processors_near(device: torch.device) -> set[int]:
    """Return the processors of a GPU's NUMA node, or none where the system does not say."""
    try:
        node = int((PCI_DEVICES / pci_name(device) / "numa_node").read_text())
        ranges = (NUMA_NODES / f"node{node}" / "cpulist").read_text().strip()
    except (OSError, ValueError):
        return set()
    return set(_numbers(ranges)) if node >= 0 else set()


def _numbers(ranges: str) -> Iterator[int]:
    """Yield the numbers of a list such as `0-3,8`."""
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
