"""Kernels in CUDA C++: compiled by NVRTC for the GPU at hand, kept on disk, launched by the driver.

Both are called through cuda-bindings, which CUDA builds of torch bring along. Kernels are launched
as programmatic dependents (pdl.py), which CuPy cannot do.
"""

from __future__ import annotations

import ctypes
import hashlib
import warnings
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from spmd_rl.kernels.runtime.disk_cache import cache_name, user_cache

Argument = Tensor | int | None
SEPARATOR = b"\n"  # between a kernel's name and its code on disk


@cache
def has_bindings() -> bool:
    """Whether cuda-bindings is installed and finds its compiler; a warning says why it does not."""
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return False
    try:
        from cuda.bindings import nvrtc

        _done(nvrtc.nvrtcVersion())
    except (ImportError, RuntimeError, OSError) as error:
        warnings.warn(f"kernels in Triton take the place of faster ones: {error}", stacklevel=2)
        return False
    return True


@cache
def kernel(source: str, name: str, shared_bytes: int, device: int) -> int:
    """Return the handle of a kernel that `source` defines, compiled unless the cache has it.

    `name` is an expression in C++, such as a template with its arguments. `device` is the current
    one. A block has `shared_bytes` of dynamic shared memory. Raises: RuntimeError with what the
    compiler says.
    """
    from cuda.bindings import driver

    capability = torch.cuda.get_device_capability(device)
    symbol, code = _compiled(source, name, f"sm_{capability[0]}{capability[1]}a")
    module = _done(driver.cuModuleLoadData(code))
    function = _done(driver.cuModuleGetFunction(module, symbol))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _done(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
    return int(function)


def launch_dependent(
    function: int, num_blocks: int, threads: int, shared_bytes: int, arguments: Sequence[Argument]
) -> None:
    """Queue a kernel that calls griddepcontrol.wait, on torch's current stream and device.

    A tensor is given by its address, None by 0, and a number as 64 bits.
    """
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = num_blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = torch.cuda.current_stream().cuda_stream
    config.attrs, config.numAttrs = [_overlaps()], 1
    values = tuple(one.data_ptr() if isinstance(one, Tensor) else one or 0 for one in arguments)
    kinds = (ctypes.c_int64,) * len(values)
    _done(driver.cuLaunchKernelEx(config, driver.CUfunction(function), (values, kinds), 0))


@cache
def _overlaps() -> Any:
    from cuda.bindings import driver

    found = driver.CUlaunchAttribute()
    found.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    found.value.programmaticStreamSerializationAllowed = 1
    return found


def _compiled(source: str, name: str, arch: str) -> tuple[bytes, bytes]:
    """Return the symbol of a kernel and the machine code that has it."""
    from cuda.bindings import nvrtc

    version = _done(nvrtc.nvrtcVersion())
    digest = hashlib.sha256(source.encode()).hexdigest()
    on_disk, key = user_cache(), cache_name("nvrtc", digest, name, arch, *version)
    kept = on_disk.read(key) if on_disk is not None else None
    if kept is None:
        kept = SEPARATOR.join(_compile(source, name, arch))
        if on_disk is not None:
            on_disk.write(key, kept)
    symbol, _, code = kept.partition(SEPARATOR)
    return symbol, code


def _compile(source: str, name: str, arch: str) -> tuple[bytes, bytes]:
    from cuda.bindings import nvrtc

    program = _done(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    try:
        _done(nvrtc.nvrtcAddNameExpression(program, name.encode()))
        options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17"]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * _done(nvrtc.nvrtcGetProgramLogSize(program))
            _done(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"{name} was not compiled: {log.decode(errors='replace')}")
        code = b" " * _done(nvrtc.nvrtcGetCUBINSize(program))
        _done(nvrtc.nvrtcGetCUBIN(program, code))
        return _done(nvrtc.nvrtcGetLoweredName(program, name.encode())), code
    finally:
        _done(nvrtc.nvrtcDestroyProgram(program))


def _done(found: tuple[Any, ...]) -> Any:
    """Return what a call of the driver or the compiler gives besides its status."""
    status, *rest = found
    if status.value != 0:
        raise RuntimeError(f"a call of {type(status).__name__} failed: {status.name}")
    return rest[0] if len(rest) == 1 else tuple(rest)
