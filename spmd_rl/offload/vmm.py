"""Calls of the CUDA driver that map physical memory of a GPU to addresses.

An address range is reserved once. Physical memory, known by a handle, is mapped into it and taken
out again. Another process can map the same physical memory by a file descriptor.

Source: CUDA driver API, Virtual Memory Management.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor

from spmd_rl.errors import ResidencyError
from spmd_rl.offload.ledger import as_size

DEVICE, PINNED, READ_WRITE = 1, 1, 3  # of CUmemLocationType, CUmemAllocationType, CUmemAccess_flags
POSIX_FD = 1  # of CUmemAllocationHandleType
PCI_NAME_BYTES = 32


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProp(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", Location),
        ("win32_handle_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class AccessDesc(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class AddressRange:
    """Reserved addresses of one GPU, at least `num_bytes` of them, with nothing mapped at first.

    Views of `bytes` may be used only while memory is mapped. The addresses are freed with the
    object. With `exportable`, `create` makes memory that another process can map too.
    """

    def __init__(self, num_bytes: int, device: torch.device, *, exportable: bool = False) -> None:
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.mem_get_info(index)  # makes the context of the GPU current in this thread
        self.device = torch.device("cuda", index)
        self._num_bytes = num_bytes
        self._location = Location(DEVICE, index)
        self._prop = AllocationProp(
            type=PINNED,
            requested_handle_types=POSIX_FD if exportable else 0,
            location=self._location,
        )
        self.size = _whole_granules(num_bytes, self._prop)
        self.address = _reserve(self.size)
        self._handles: list[int] = []
        weakref.finalize(self, _free, self.address, self.size, self._handles).atexit = False

    @property
    def is_mapped(self) -> bool:
        return bool(self._handles)

    @property
    def bytes(self) -> Tensor:
        return bytes_at(self.address, self._num_bytes, self.device)

    def create(self) -> int:
        """Return a handle of new physical memory of this size, whose content is undefined.

        Raises: ResidencyError when the GPU has too little left.
        """
        require_free(self.size, self._location.id)
        handle = ctypes.c_uint64()
        size, no_flags = ctypes.c_size_t(self.size), ctypes.c_uint64(0)
        call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._prop), no_flags)
        return handle.value

    def map(self, handle: int) -> None:
        """Map the memory of `handle`, which this object owns from now on, also if this fails."""
        at, size = ctypes.c_uint64(self.address), ctypes.c_size_t(self.size)
        offset, no_flags = ctypes.c_size_t(0), ctypes.c_uint64(0)
        try:
            call("cuMemMap", at, size, offset, ctypes.c_uint64(handle), no_flags)
        except ResidencyError:
            call("cuMemRelease", ctypes.c_uint64(handle))
            raise
        self._handles.append(handle)
        access = AccessDesc(self._location, READ_WRITE)
        try:
            call("cuMemSetAccess", at, size, ctypes.byref(access), ctypes.c_size_t(1))
        except ResidencyError:
            _unmap(self.address, self.size, self._handles)
            raise

    def unmap(self) -> None:
        """Take the memory out. It is free once no other process has it mapped.

        Blocks: until the GPU has finished its queued work.
        """
        torch.cuda.synchronize(self._location.id)
        _unmap(self.address, self.size, self._handles)

    def export_fd(self) -> int:
        """Return a file descriptor of the mapped memory, which the caller owns."""
        fd = ctypes.c_int(-1)
        handle, kind = ctypes.c_uint64(self._handles[0]), ctypes.c_int(POSIX_FD)
        call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, kind, ctypes.c_uint64(0))
        return fd.value


def import_fd(fd: int) -> int:
    """Return a handle of the memory that another process exported. `fd` still belongs to the
    caller.
    """
    handle = ctypes.c_uint64()
    at_fd, kind = ctypes.c_void_p(fd), ctypes.c_int(POSIX_FD)
    call("cuMemImportFromShareableHandle", ctypes.byref(handle), at_fd, kind)
    return handle.value


def free_bytes(device: torch.device | int, wanted: int) -> int:
    """Return the free memory of a GPU, with what torch only caches if that is less than `wanted`.

    Blocks: on work that uses the cache, where the cache is given back.
    """
    free = torch.cuda.mem_get_info(device)[0]
    if free < wanted:
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
    return free


def require_free(num_bytes: int, device: torch.device | int) -> None:
    """Raise a ResidencyError if the GPU has less than `num_bytes` left."""
    if num_bytes and (free := free_bytes(device, num_bytes)) < num_bytes:
        raise ResidencyError(
            f"{as_size(num_bytes)} are asked for, and the GPU has {as_size(free)} left"
        )


def pci_name(device: torch.device) -> str:
    """Return the name of a GPU on the PCI bus, as /sys/bus/pci/devices has it."""
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    name = ctypes.create_string_buffer(PCI_NAME_BYTES)
    call("cuDeviceGetPCIBusId", name, ctypes.c_int(PCI_NAME_BYTES), ctypes.c_int(index))
    return name.value.decode().lower()


def bytes_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """Return GPU memory as a tensor, which does not own it."""
    return torch.as_tensor(_Array(address, num_bytes), device=device)


def call(name: str, *arguments: Any) -> None:
    """Call the driver. Raises: ResidencyError with the driver's words."""
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise ResidencyError(f"{name}: {(text.value or b'unknown error').decode()}")


class _Array:
    """Bytes at a GPU address, in the interface that torch wraps without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _whole_granules(num_bytes: int, prop: AllocationProp) -> int:
    granularity, minimum = ctypes.c_size_t(), ctypes.c_int(0)
    call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(prop), minimum)
    return -(-num_bytes // granularity.value) * granularity.value


def _reserve(size: int) -> int:
    address, none = ctypes.c_uint64(), ctypes.c_uint64(0)
    alignment = ctypes.c_size_t(0)
    call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size), alignment, none, none)
    return address.value


def _unmap(address: int, size: int, handles: list[int]) -> None:
    while handles:
        call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))
        call("cuMemRelease", ctypes.c_uint64(handles.pop()))


def _free(address: int, size: int, handles: list[int]) -> None:
    torch.cuda.synchronize()
    _unmap(address, size, handles)
    call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
