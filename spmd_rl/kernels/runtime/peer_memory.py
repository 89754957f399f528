"""PeerMemory: memory of the GPUs of a host that every rank of a group reads and writes.

It is torch's symmetric memory. Barriers are kernels too, so the host does not wait, and all that
goes on there can be recorded as a CUDA graph. NVLink multicast is not used.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

MULTICAST_ENV = "TORCH_SYMM_MEM_DISABLE_MULTICAST"  # torch would set it up though nobody uses it


class PeerMemory:
    """Equally many bytes of each rank of a group.

    `own` are those of this rank, uint8. `barrier(channel)` queues a kernel that waits for the same
    barrier of all ranks: what they queued before it is done then, and seen by all.
    """

    own: Tensor
    barrier: Callable[[int], None]

    def __init__(
        self, group: dist.ProcessGroup, num_bytes: int, channels: Sequence[int] = (0,)
    ) -> None:
        """Make the memory on the current device, outside of any that sleeps.

        `channels` are those of its barriers. Ranks: all of the group. Blocks: until each has
        called.
        """
        os.environ.setdefault(MULTICAST_ENV, "1")
        from torch.distributed import _symmetric_memory as symmetric

        device = torch.device("cuda", torch.cuda.current_device())
        self.num_ranks = group.size()
        self.own = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(self.own, group)
        self._pointers: Sequence[int] = handle.buffer_ptrs
        self.barrier = handle.barrier
        for channel in channels:  # loads its kernel, as a rehearsal has none
            self.barrier(channel)

    def table(self, first_byte: int) -> Tensor:
        """Return where that byte of each rank's memory is. Shape: [P] int64, on the device."""
        found = [one + first_byte for one in self._pointers]
        return torch.tensor(found, dtype=torch.int64, device=self.own.device)

    def rehearsal(self) -> PeerMemory:
        """Return other memory, of this rank alone, that stands for that of all. Nobody waits."""
        other = copy.copy(self)
        other.own = torch.zeros(len(self.own), dtype=torch.uint8, device=self.own.device)
        other._pointers = [other.own.data_ptr()] * self.num_ranks
        other.barrier = _wait_for_nobody
        return other


def _wait_for_nobody(channel: int) -> None:
    """The barrier of a rehearsal."""
