"""ExportedMemory: memory that two processes of one machine have mapped, by a file descriptor.

On a GPU it is memory of the driver's mapping calls. On the CPU it is a memfd that can no longer
change its size: where a file became shorter than its mapping, the next access would kill the
process that reads it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat

import torch
from torch import Tensor

from spmd_rl.errors import ResidencyError
from spmd_rl.offload.vmm import AddressRange, import_fd

FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class ExportedMemory:
    """`num_bytes` of memory as the tensor `bytes`, which another process maps too.

    On a GPU no view of `bytes` may be used after `close`.
    """

    def __init__(self, data: Tensor, owner: AddressRange | int | None) -> None:
        self.bytes = data
        self._owner = owner  # addresses on a GPU; the descriptor of the memfd that was made here

    @classmethod
    def create(cls, num_bytes: int, device: torch.device) -> ExportedMemory:
        """Make new memory. Raises: ResidencyError when there is too little."""
        if device.type == "cuda":
            addresses = AddressRange(num_bytes, device, exportable=True)
            addresses.map(addresses.create())
            return cls(addresses.bytes, addresses)
        fd = os.memfd_create("spmd_rl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, FIXED_SIZE)
            return cls(_map_file(fd, num_bytes), fd)
        except OSError as error:
            os.close(fd)
            raise ResidencyError(f"cannot make {num_bytes} bytes of memory: {error}") from error

    @classmethod
    def open(cls, fd: int, num_bytes: int, device: torch.device) -> ExportedMemory:
        """Map the memory behind `fd`, which still belongs to the caller.

        Raises: ResidencyError when `fd` is not such memory, or is smaller than `num_bytes`.
        """
        if device.type == "cuda":
            addresses = AddressRange(num_bytes, device)
            addresses.map(import_fd(fd))
            return cls(addresses.bytes, addresses)
        _check_memfd(fd, num_bytes)
        try:
            return cls(_map_file(fd, num_bytes), None)
        except OSError as error:
            raise ResidencyError(f"cannot map {num_bytes} bytes: {error}") from error

    def export_fd(self) -> int:
        """Return a file descriptor for another process, which the caller owns."""
        if isinstance(self._owner, AddressRange):
            fd = self._owner.export_fd()
            os.set_inheritable(fd, False)
            return fd
        if self._owner is None:
            raise ResidencyError(
                "only the process that made memory can export it, until it closes it"
            )
        return os.dup(self._owner)

    def close(self) -> None:
        """Unmap the memory; it is free once the other process has closed its own. Idempotent."""
        self.bytes = self.bytes.new_empty(0)
        owner, self._owner = self._owner, None
        if isinstance(owner, AddressRange):
            owner.unmap()
        elif owner is not None:
            os.close(owner)


def _map_file(fd: int, num_bytes: int) -> Tensor:
    """Return the file as a tensor. Its memory is unmapped with the last view of it."""
    return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)


def _check_memfd(fd: int, num_bytes: int) -> None:
    status = os.fstat(fd)
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS) if stat.S_ISREG(status.st_mode) else 0
    except OSError:  # a file that is no memfd
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ResidencyError("the file descriptor is not a memfd that is sealed against shrinking")
    if status.st_size < num_bytes:
        raise ResidencyError(f"{num_bytes} bytes are announced, the memfd has {status.st_size}")
