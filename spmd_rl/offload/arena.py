"""HostArena: pinned host memory of one rank, where regions that sleep keep their bytes.

Memory is allocated once for each region and stays until the process ends: a first touch of pages is
slower than a copy from a GPU, so that allocating at each step would look like slow offload. Pages
are touched on processors next to the GPU, and are then registered with CUDA. torch's own allocator
of pinned memory is not used, since it rounds sizes up to powers of two.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
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


class HostArena:
    """Host memory for copies of one rank's GPU memory.

    `limit_bytes` bounds all of it; 0 stands for what cgroup and machine leave at each request.
    """

    def __init__(self, device: torch.device, limit_bytes: int = 0) -> None:
        self._device = device
        self._limit_bytes = limit_bytes
        self._blocks: list[mmap.mmap] = []
        self.num_bytes = 0

    def reserve(self, num_bytes: int) -> Tensor:
        """Return new host memory, pinned where the device is a GPU, as bytes that stay valid.

        Raises: ResidencyError before anything is allocated, if it exceeds the limit.
        """
        self._require_room(num_bytes)
        block = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            block.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(block, dtype=torch.uint8)
        with _near(self._device):
            memory.zero_()
        if self._device.type == "cuda":
            _pin(memory)
        self._blocks.append(block)
        self.num_bytes += num_bytes
        return memory[:num_bytes]

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


def _pin(memory: Tensor) -> None:
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), PORTABLE)
    if int(code) != 0:
        raise ResidencyError(
            f"CUDA cannot pin {as_size(memory.numel())} of host memory: error {int(code)}"
        )


@contextmanager
def _near(device: torch.device) -> Iterator[None]:
    """Run on the processors of the GPU's NUMA node meanwhile, whose memory a first touch takes."""
    near = _processors_near(device)
    if not near:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, near & before or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _processors_near(device: torch.device) -> set[int]:
    """Return the processors of a GPU's NUMA node, or none where the system does not say."""
    if device.type != "cuda":
        return set()
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
