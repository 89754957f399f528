"""Regions: memory of a role that is unmapped and mapped again at the same addresses, by tag.

A region's contents are dropped, or saved in host memory. There are two kinds. A `TorchRegion` holds
what torch allocates while it is open, such as the shards of FSDP2 and an optimizer's state. A
`SlabRegion` is one piece of memory that its owner lays out, such as an engine's weights and pages.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from spmd_rl.errors import ResidencyError
from spmd_rl.offload import tms
from spmd_rl.offload.arena import HostArena
from spmd_rl.offload.copies import Copy, Pairs, copy_in, copy_out
from spmd_rl.offload.elastic import ElasticMemory
from spmd_rl.offload.host import HostMemory
from spmd_rl.offload.ledger import as_size
from spmd_rl.offload.residency import Residency
from spmd_rl.offload.vmm import bytes_at, require_free

Contents = Literal["drop", "save"]
ALIGN_BYTES = 512  # of pieces in host memory, as torch's allocator aligns
# Blocks of torch's allocator that are this close travel as one piece, with what is between them.
# One more copy costs about as much time as so many bytes.
GAP_BYTES = 256 << 10
SMALL_BYTES = 1 << 20  # torch's allocator puts smaller tensors into segments of 2 MiB


def segment_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes of one segment that tensors of these sizes are cut from.

    Small ones are left out: torch's allocator has other segments for them.
    """
    return sum(-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes if size > SMALL_BYTES)


class Region(ABC):
    """Memory of one tag. It is mapped at first.

    A subclass says which bytes it holds, and how it is unmapped and mapped. `changes` counts
    changes of the contents, so that unchanged bytes are not saved twice.
    """

    def __init__(self, tag: str, contents: Contents, device: torch.device) -> None:
        self.residency = Residency(tag)
        self.contents: Contents = contents
        self.changes = 0
        self.copy: Copy | None = None  # that is under way
        self.device = device
        self._host: Tensor | None = None
        self._saved: Pairs = ()  # bytes of the region, and host memory that has them
        self._saved_changes = -1

    @property
    def tag(self) -> str:
        return self.residency.tag

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """The bytes of device memory that the region has while it is mapped."""

    @property
    def mapped_bytes(self) -> int:
        return self.num_bytes if self.residency.is_mapped else 0

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory that the region has."""
        return 0 if self._host is None else self._host.numel()

    @property
    def is_saved(self) -> bool:
        """Whether host memory has the contents as they are."""
        return self._saved_changes == self.changes

    @abstractmethod
    def pieces(self) -> Sequence[Tensor]:
        """Return the bytes that are saved, in few pieces of one dimension."""

    @abstractmethod
    def unmap(self) -> None:
        """Give the memory back. No work that uses it may be queued."""

    @abstractmethod
    def map(self) -> None:
        """Take the memory again. Raises: ResidencyError where too little is left."""

    def reserve_host(self, arena: HostArena) -> None:
        """Take host memory for the contents now, rather than at the first save.

        Raises: ResidencyError where there is no room.
        """
        self._host_pieces(self.pieces(), arena)

    def begin_save(self, arena: HostArena) -> None:
        """Start to copy the contents to the host, unless it has them.

        Raises: ResidencyError where there is no room, and the region is as before.
        """
        if self.is_saved:
            self.residency.move("saving")
            return
        pieces = self.pieces()
        hosts = self._host_pieces(pieces, arena)
        self.residency.move("saving")
        self.copy = copy_out(list(zip(hosts, pieces, strict=True)), self.device)
        self._saved, self._saved_changes = list(zip(pieces, hosts, strict=True)), self.changes

    def begin_load(self) -> None:
        """Start to copy the contents back from the host."""
        self.residency.move("loading")
        self.copy = copy_in(self._saved, self.device)

    def _host_pieces(self, pieces: Sequence[Tensor], arena: HostArena) -> list[Tensor]:
        """Return host memory for each piece, of one block that is kept until it is too small."""
        starts, end = [], 0
        for piece in pieces:
            starts.append(end + -end % ALIGN_BYTES)
            end = starts[-1] + piece.numel()
        if self._host is None or self._host.numel() < end:
            self._saved, self._saved_changes, self._host = (), -1, None
            self._host = arena.reserve(end)
        host = self._host
        return [
            host[start : start + piece.numel()] for start, piece in zip(starts, pieces, strict=True)
        ]


torch_regions: weakref.WeakSet[TorchRegion] = weakref.WeakSet()  # of all roles of this process


class TorchRegion(Region):
    """Memory that torch allocates inside `allocating`. `name` is unique in the process.

    On a GPU all blocks in use are saved, whoever has them. On a CPU the storages of the tensors
    that are held are saved, freed and allocated again.
    """

    def __init__(self, tag: str, contents: Contents, device: torch.device, name: str) -> None:
        super().__init__(tag, contents, device)
        self._name = name
        self._tensors: Callable[[], Iterable[Tensor]] = tuple
        self._pool: tms.PoolId | None = None
        self._pool_bytes, self._used_bytes = 0, 0
        self._storages: list[tuple[torch.UntypedStorage, int]] = []  # that are freed, with sizes
        torch_regions.add(self)

    @property
    def num_bytes(self) -> int:
        if self.device.type == "cuda":
            return self._pool_bytes
        if self._storages:
            return sum(num_bytes for _, num_bytes in self._storages)
        return sum(piece.numel() for piece in self.pieces())

    @contextmanager
    def allocating(self, num_bytes: int = 0) -> Iterator[None]:
        """Have this thread allocate its memory in this region.

        `num_bytes`, if what comes is known, are taken as one segment. Many segments take longer to
        map than one, and the library ends the process where memory runs out in the midst.
        Raises: ResidencyError while the region sleeps, or where `num_bytes` are not left; and as
        `tms.region`.
        """
        self.residency.require_awake("allocate")
        if self.device.type != "cuda":
            yield
            self.changes += 1
            return
        require_free(num_bytes, self.device)
        with torch.cuda.device(self.device), tms.region(self._name) as current_pool:
            if num_bytes:  # torch's allocator keeps the block, and cuts later ones from it
                torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            self._pool = self._pool or current_pool()
            yield
        segments = tms.segments(self._pool)
        self._pool_bytes = sum(segment["total_size"] for segment in segments)
        self._used_bytes = sum(segment["allocated_size"] for segment in segments)
        self.changes += 1

    @property
    def used_bytes(self) -> int:
        """The bytes of the GPU that torch had allocated when `allocating` ended last."""
        return self._used_bytes

    def hold(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """Say which tensors the region holds, for each save to see that their bytes are in it."""
        self._tensors = tensors

    def pieces(self) -> Sequence[Tensor]:
        if self.device.type != "cuda":
            storages = {one._cdata: one for one in map(Tensor.untyped_storage, self._tensors())}
            return [torch.empty(0, dtype=torch.uint8).set_(one) for one in storages.values()]
        ranges = list(_ranges(tms.segments(self._pool))) if self._pool else []
        self._require_within(ranges)
        return [bytes_at(start, end - start, self.device) for start, end in ranges]

    def unmap(self) -> None:
        if self.device.type == "cuda":
            if self._pool_bytes:
                tms.unmap(self._name)
            return
        storages = [piece.untyped_storage() for piece in self.pieces()]
        self._storages = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)

    def map(self) -> None:
        if self.device.type == "cuda":
            if self._pool_bytes:
                tms.map_again(self._name, self._pool_bytes)
            return
        for storage, num_bytes in self._storages:
            storage.resize_(num_bytes)
        self._storages = []

    def _require_within(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Raise a ResidencyError if a tensor of the GPU is held that has its memory elsewhere."""
        starts = [start for start, _ in ranges]
        for tensor in self._tensors():
            if not tensor.is_cuda or not tensor.numel():
                continue
            at = bisect_right(starts, tensor.data_ptr()) - 1
            if at < 0 or tensor.data_ptr() >= ranges[at][1]:
                raise ResidencyError(
                    f"a tensor of {as_size(tensor.nbytes)} belongs to memory '{self.tag}' and was "
                    "not allocated in it: make it inside `allocating`"
                )


class SlabRegion(Region):
    """One piece of `num_bytes` of memory, as the tensor `bytes`; its content is unset at first."""

    def __init__(self, tag: str, contents: Contents, device: torch.device, num_bytes: int) -> None:
        super().__init__(tag, contents, device)
        on_gpu = device.type == "cuda"
        size = max(num_bytes, 1)
        self._memory: ElasticMemory | HostMemory = (
            ElasticMemory(size, device) if on_gpu else HostMemory(size)
        )
        self._num_bytes = num_bytes

    @property
    def bytes(self) -> Tensor:
        return self._memory.bytes[: self._num_bytes]

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def pieces(self) -> Sequence[Tensor]:
        return [self.bytes]

    def unmap(self) -> None:
        self._memory.unmap()

    def map(self) -> None:
        self._memory.map()


def _ranges(segments: Iterable[tms.Segment]) -> Iterator[tuple[int, int]]:
    """Yield the addresses of blocks in use, start and end, joined over small gaps of a segment."""
    for segment in segments:
        start, end = 0, 0
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                if end and address - end > GAP_BYTES:
                    yield start, end
                    end = 0
                start, end = start if end else address, address + block["size"]
            address += block["size"]
        if end:
            yield start, end
