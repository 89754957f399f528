"""Slab: memory of a rank that the process which generates on its GPU has mapped too.

There is one slab for each pair of processes. Its file descriptor is given once. Each later use of
it names the slab's generation, so that a view of a slab that was replaced is refused.
"""

from __future__ import annotations

import itertools
import os
from math import prod

import torch
from torch import Tensor

from spmd_rl.errors import ResidencyError, StaleSlabError, WeightsError
from spmd_rl.offload.exported_memory import ExportedMemory
from spmd_rl.weights.plan.layout import ITEM_BYTES, Dims
from spmd_rl.weights.slab.peer_socket import MAX_SLAB_BYTES, PeerSocket, SlabHeader

ALIGN_BYTES = 256  # of every offset, so that a GPU copies in its widest words
MAX_DIMS = 8
RECEIVE_DEADLINE_S = 60.0
_generations = itertools.count(1)


class _SharedSlab:
    """What both ends of a slab have: its bytes, and checked views of them."""

    def __init__(self, memory: ExportedMemory, generation: int) -> None:
        self.generation = generation
        self.num_bytes = memory.bytes.numel()
        self.device = memory.bytes.device
        self._memory = memory

    @property
    def memory(self) -> Tensor:
        """The bytes of the slab."""
        return self._memory.bytes

    def view(self, generation: int, offset: int, dtype: str, shape: Dims) -> Tensor:
        """Return the bytes from `offset` on as a tensor.

        Raises: StaleSlabError when `generation` is that of another slab; WeightsError when the
        view would leave the slab or is not aligned.
        """
        if generation != self.generation:
            raise StaleSlabError(
                f"slab {generation} is asked for, and slab {self.generation} is mapped: "
                "send the new slab first"
            )
        if dtype not in ITEM_BYTES:
            raise WeightsError(f"a view of a slab has no dtype '{dtype}'")
        if len(shape) > MAX_DIMS or min(shape, default=0) < 0:
            raise WeightsError(f"a view of a slab cannot have the shape {list(shape[:MAX_DIMS])}")
        if offset % ALIGN_BYTES:
            raise WeightsError(f"offset {offset} of a slab is not a multiple of {ALIGN_BYTES}")
        end = offset + prod(shape) * ITEM_BYTES[dtype]
        if offset < 0 or end > self.num_bytes:
            raise WeightsError(
                f"bytes {offset} to {end} are asked for, and the slab has {self.num_bytes}"
            )
        return self.memory[offset:end].view(getattr(torch, dtype)).view(shape)

    def close(self) -> None:
        """Unmap the slab. On a GPU no view of it may be used afterwards."""
        self._memory.close()
        self.generation, self.num_bytes = -1, 0


class Slab(_SharedSlab):
    """The rank's end of a slab."""

    @classmethod
    def create(cls, num_bytes: int, device: torch.device) -> Slab:
        """Make a slab of `num_bytes` with undefined content.

        Raises: ResidencyError when the device has too little memory left.
        """
        if not 0 < num_bytes <= MAX_SLAB_BYTES:
            raise WeightsError(f"a slab cannot have {num_bytes} bytes")
        return cls(ExportedMemory.create(num_bytes, device), next(_generations))

    def send(self, peer: PeerSocket) -> None:
        """Let the other process map this slab in place of the one before.

        Blocks: until the socket has room. Raises: LostRankError when the peer is gone.
        """
        header = SlabHeader(
            num_bytes=self.num_bytes,
            generation=self.generation,
            kind="cuda" if self.device.type == "cuda" else "cpu",
            gpu=_gpu_uuid(self.device),
        )
        fd = self._memory.export_fd()
        try:
            peer.send(header)
            peer.send_fd(fd)
        finally:
            os.close(fd)


class MappedSlab(_SharedSlab):
    """The end of a slab in the process that generates."""

    @classmethod
    def receive(
        cls, peer: PeerSocket, device: torch.device, deadline_s: float = RECEIVE_DEADLINE_S
    ) -> MappedSlab:
        """Map the slab that the peer sends. Close the slab before first.

        Blocks: until the slab is there; the peer sends it.
        Raises: WeightsError when it is not on `device` or not what its header says; LostRankError
        when the peer is gone, DeadlineError after `deadline_s`.
        """
        header = peer.receive(deadline_s)
        if not isinstance(header, SlabHeader):
            raise WeightsError(f"{peer.peer} sent a {type(header).__name__} in place of a slab")
        fd = peer.receive_fd(deadline_s)
        try:
            _check_device(header, device)
            memory = ExportedMemory.open(fd, header.num_bytes, device)
        except ResidencyError as error:
            raise WeightsError(f"the slab of {peer.peer} cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        return cls(memory, header.generation)


def _check_device(header: SlabHeader, device: torch.device) -> None:
    if header.kind != device.type:
        raise WeightsError(f"the slab is memory of kind {header.kind}, and {device} is expected")
    own_gpu = _gpu_uuid(device)
    if header.gpu != own_gpu:
        raise WeightsError(f"the slab lies on GPU '{header.gpu}', and this process uses {own_gpu}")


def _gpu_uuid(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)
