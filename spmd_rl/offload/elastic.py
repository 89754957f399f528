"""ElasticMemory: GPU memory that can be given back while its address stays the same.

A range of addresses is reserved once. Physical memory is mapped into it, and taken out again. So
tensors in it, and CUDA graphs recorded over them, are valid again after the next mapping. Contents
are lost.

Source: CUDA driver API, Virtual Memory Management; torch_memory_saver keeps addresses for graphs
in the same way.
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


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationProp(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _AccessDesc(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class ElasticMemory:
    """`num_bytes` of one GPU's memory, which is mapped at first.

    Views of `bytes` may be used only while it is mapped. The addresses are freed with the object.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        self.num_bytes = num_bytes
        self._location = _Location(DEVICE, index)
        self._prop = _AllocationProp(type=PINNED, location=self._location)
        granularity = ctypes.c_size_t()
        _call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(granularity),
            ctypes.byref(self._prop),
            ctypes.c_int(0),
        )
        self._size = -(-num_bytes // granularity.value) * granularity.value
        address = ctypes.c_uint64()
        size, none = ctypes.c_size_t(self._size), ctypes.c_uint64(0)
        _call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), none, none)
        self._address = address.value
        self._handles: list[int] = []
        weakref.finalize(self, _release, self._address, self._size, self._handles).atexit = False
        self.map()
        self.bytes: Tensor = torch.as_tensor(
            _Array(self._address, num_bytes), device=torch.device("cuda", index)
        )

    @property
    def is_mapped(self) -> bool:
        return bool(self._handles)

    def map(self) -> None:
        """Map physical memory with undefined content to the addresses.

        Raises: ResidencyError when the GPU has too little left.
        """
        if self._handles:
            return
        torch.cuda.empty_cache()  # so that torch gives back the memory that it only caches
        if (free_bytes := torch.cuda.mem_get_info(self._location.id)[0]) < self._size:
            raise ResidencyError(
                f"{as_size(self._size)} are asked for, and the GPU has {as_size(free_bytes)} left"
            )
        handle, size = ctypes.c_uint64(), ctypes.c_size_t(self._size)
        _call(
            "cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._prop), ctypes.c_uint64(0)
        )
        at, access = ctypes.c_uint64(self._address), _AccessDesc(self._location, READ_WRITE)
        try:
            _call("cuMemMap", at, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        except ResidencyError:
            _call("cuMemRelease", handle)
            raise
        self._handles.append(handle.value)
        try:
            _call("cuMemSetAccess", at, size, ctypes.byref(access), ctypes.c_size_t(1))
        except ResidencyError:
            _unmap(self._address, self._size, self._handles)
            raise

    def unmap(self) -> None:
        """Give the memory back. Blocks: until the GPU has finished its queued work."""
        torch.cuda.synchronize(self._location.id)
        _unmap(self._address, self._size, self._handles)


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


def _unmap(address: int, size: int, handles: list[int]) -> None:
    while handles:
        _call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))
        _call("cuMemRelease", ctypes.c_uint64(handles.pop()))


def _release(address: int, size: int, handles: list[int]) -> None:
    torch.cuda.synchronize()
    _unmap(address, size, handles)
    _call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise ResidencyError(f"{name}: {(text.value or b'unknown error').decode()}")
