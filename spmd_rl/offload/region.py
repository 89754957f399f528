"""Regions: memory of a role that is unmapped and mapped again at the same addresses, by tag.

A region's contents are dropped, or saved in host memory. There are two kinds. A `TorchRegion` holds
what torch allocates while it is open, such as the shards of FSDP2 and an optimizer's state. A
`SlabRegion` is one piece of memory that its owner lays out, such as an engine's weights and pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from spmd_rl.offload import tms
from spmd_rl.offload.arena import HostArena
from spmd_rl.offload.copies import Copy, copy_in, copy_out
from spmd_rl.offload.elastic import ElasticMemory
from spmd_rl.offload.host import HostMemory
from spmd_rl.offload.residency import Residency

Contents = Literal["drop", "save"]
ALIGN_BYTES = 512  # of tensors in host memory, as torch's allocator aligns


class Region:
    """Memory of one tag. It is mapped at first.

    A subclass says which tensors it holds, and how it is unmapped and mapped. `changes` counts
    changes of the contents, so that unchanged bytes are not saved twice.
    """

    def __init__(self, tag: str, contents: Contents, device: torch.device) -> None:
        self.residency = Residency(tag)
        self.contents: Contents = contents
        self.changes = 0
        self.copy: Copy | None = None  # that is under way, or was the last one
        self._device = device
        self._host: Tensor | None = None
        self._saved_changes = -1

    @property
    def tag(self) -> str:
        return self.residency.tag

    @property
    def num_bytes(self) -> int:
        """The bytes of device memory that the region has while it is mapped."""
        raise NotImplementedError

    @property
    def mapped_bytes(self) -> int:
        return self.num_bytes if self.residency.is_mapped else 0

    @property
    def is_saved(self) -> bool:
        """Whether host memory has the contents as they are."""
        return self._saved_changes == self.changes

    def tensors(self) -> Sequence[Tensor]:
        """Return the tensors whose bytes are saved, always in the same order."""
        raise NotImplementedError

    def unmap(self) -> None:
        """Give the memory back. No work that uses it may be queued."""
        raise NotImplementedError

    def map(self) -> None:
        """Take the memory again. Raises: ResidencyError where too little is left."""
        raise NotImplementedError

    def begin_save(self, arena: HostArena) -> None:
        """Start to copy the contents to the host, unless it has them.

        Raises: ResidencyError where there is no room, and the region is as before.
        """
        pairs = self._pairs(arena)
        self.residency.move("saving")
        self.copy = None
        if not self.is_saved:
            self.copy = copy_out([(host, own) for own, host in pairs], self._device)
            self._saved_changes = self.changes

    def begin_load(self, arena: HostArena) -> None:
        """Start to copy the contents back from the host."""
        self.residency.move("loading")
        self.copy = copy_in(self._pairs(arena), self._device)

    def _pairs(self, arena: HostArena) -> list[tuple[Tensor, Tensor]]:
        """Return each tensor with its bytes in host memory."""
        tensors = [tensor.detach() for tensor in self.tensors() if tensor.numel()]
        ends, end = [], 0
        for tensor in tensors:
            end = -(-end // ALIGN_BYTES) * ALIGN_BYTES + tensor.nbytes
            ends.append(end)
        if self._host is None or self._host.numel() < end:
            self._host = arena.reserve(end)
        return [
            (tensor, self._host[end - tensor.nbytes : end].view(tensor.dtype).view(tensor.shape))
            for tensor, end in zip(tensors, ends, strict=True)
        ]


class TorchRegion(Region):
    """Memory that torch allocates inside `allocating`. `name` is unique in the process.

    On a CPU, the storages of the tensors that it holds are freed and allocated again.
    """

    def __init__(self, tag: str, contents: Contents, device: torch.device, name: str) -> None:
        super().__init__(tag, contents, device)
        self._name = name
        self._tensors: Callable[[], Iterable[Tensor]] = tuple
        self._reserved_bytes = 0
        self._storage_bytes: list[int] = []

    @property
    def num_bytes(self) -> int:
        if self._device.type == "cuda":
            return self._reserved_bytes
        return sum(self._storage_bytes or [one.nbytes() for one in self._storages()])

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Have this thread allocate its memory in this region. Raises: as `tms.region`."""
        if self._device.type != "cuda":
            yield
            return
        torch.cuda.empty_cache()  # so that no block of the cache is given back meanwhile
        before = torch.cuda.memory_reserved(self._device)
        with tms.region(self._name):
            yield
        self._reserved_bytes += torch.cuda.memory_reserved(self._device) - before

    def hold(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """Save the bytes of what `tensors` returns: the same tensors at each call."""
        self._tensors = tensors

    def tensors(self) -> Sequence[Tensor]:
        return list(self._tensors())

    def unmap(self) -> None:
        if self._device.type == "cuda":
            tms.unmap(self._name)
            return
        storages = self._storages()
        self._storage_bytes = [storage.nbytes() for storage in storages]
        for storage in storages:
            storage.resize_(0)

    def map(self) -> None:
        if self._device.type == "cuda":
            tms.map_again(self._name)
            return
        for storage, num_bytes in zip(self._storages(), self._storage_bytes, strict=True):
            storage.resize_(num_bytes)
        self._storage_bytes = []

    def _storages(self) -> list[torch.UntypedStorage]:
        """Return the storage of each tensor once."""
        storages = (tensor.untyped_storage() for tensor in self.tensors())
        return list({storage._cdata: storage for storage in storages}.values())


class SlabRegion(Region):
    """One piece of `num_bytes` of memory, as the tensor `bytes`; its content is unset at first."""

    def __init__(self, tag: str, contents: Contents, device: torch.device, num_bytes: int) -> None:
        super().__init__(tag, contents, device)
        on_gpu = device.type == "cuda"
        self._memory: ElasticMemory | HostMemory = (
            ElasticMemory(num_bytes, device) if on_gpu else HostMemory(max(num_bytes, 1))
        )
        self._num_bytes = num_bytes

    @property
    def bytes(self) -> Tensor:
        return self._memory.bytes[: self._num_bytes]

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def tensors(self) -> Sequence[Tensor]:
        return [self.bytes]

    def unmap(self) -> None:
        self._memory.unmap()

    def map(self) -> None:
        self._memory.map()
