"""Compiled CuTe DSL kernels, ours and FlashAttention-4's, in memory and in the disk cache.

Compiling takes seconds and loading takes milliseconds. A kernel's name on disk follows from all
that its machine code depends on: sources, versions, GPU, host processor and settings of the
compiler, and the key of the kernel itself. Processes do not wait for each other: each compiles what
it does not find.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import cutlass.cute as cute
import torch

from spmd_rl.kernels.runtime.cache_key import gpu, host_processor, package_versions, sources_digest
from spmd_rl.kernels.runtime.disk_cache import DiskCache, cache_name, user_cache

Kernel = Callable[..., None]
SETTINGS = "CUTE_DSL_"  # prefix of the compiler's environment variables
SYMBOL = "kernel"  # of the function in a compiled object


class CompiledKernels(dict[Any, Any]):
    """Kernels of one kind by key, with the methods of a dict that FlashAttention-4 uses.

    A kernel whose key has parts of unusual types stays in memory.
    """

    def __init__(self, kind: str, disk: DiskCache | None) -> None:
        super().__init__()
        self._kind = kind
        self._disk = disk

    def __contains__(self, key: object) -> bool:
        """Return whether the kernel is there, after a look at the disk if need be."""
        if super().__contains__(key):
            return True
        kernel = None
        if self._disk is not None and (name := self._name(key)) is not None:
            kernel = _read(self._disk, name)
        if kernel is not None:
            super().__setitem__(key, kernel)
        return kernel is not None

    def __setitem__(self, key: object, kernel: Any) -> None:
        super().__setitem__(key, kernel)
        if self._disk is not None and (name := self._name(key)) is not None:
            _write(self._disk, name, kernel)

    def _name(self, key: object) -> str | None:
        with contextlib.suppress(TypeError):
            return cache_name(self._kind, _environment(torch.cuda.current_device()), key)
        return None


def cached_on_disk(compile_kernel: Callable[..., Kernel]) -> Callable[..., Kernel]:
    """Keep what a function compiles, by its arguments."""
    kernels = CompiledKernels(compile_kernel.__name__, user_cache())

    @wraps(compile_kernel)
    def compiled(*key: Any) -> Kernel:
        kernel: Kernel | None = kernels.get(key)
        if kernel is None:
            if key not in kernels:
                kernels[key] = compile_kernel(*key)
            kernel = kernels[key]
        return kernel

    return compiled


@cache
def flash_interface() -> Any:
    """Return FlashAttention-4's module of functions, whose kernels are kept on disk from now on."""
    from flash_attn.cute import interface

    # The CuTe DSL says so of an argument of each of these kernels, which all the same are right.
    warnings.filterwarnings("ignore", "Argument aux_data .*cannot be converted", UserWarning)
    for name, function in vars(interface).items():
        if hasattr(function, "compile_cache"):
            function.compile_cache = CompiledKernels(name.strip("_"), user_cache())
    return interface


@cache
def _environment(device: int) -> tuple[object, ...]:
    """Return what all kernels depend on."""
    settings = sorted(item for item in os.environ.items() if item[0].startswith(SETTINGS))
    facts = gpu(torch.device("cuda", device)), host_processor(), tuple(settings)
    return package_versions(), sources_digest(), facts


def _write(disk: DiskCache, name: str, kernel: Any) -> None:
    """Keep a kernel as an object file. Where that fails, there is a warning."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.o"
        try:
            kernel.export_to_c(object_file_path=str(path), function_name=SYMBOL)
            code = path.read_bytes()
        except Exception as error:  # noqa: BLE001  the kernel runs all the same
            warnings.warn(f"a compiled kernel is not kept on disk: {error}", stacklevel=2)
            return
    disk.write(name, code)


def _read(disk: DiskCache, name: str) -> Kernel | None:
    if (code := disk.read(name)) is None:
        return None
    with open(os.memfd_create("kernel"), "wb") as file:
        file.write(code)
        file.flush()
        path = f"/proc/self/fd/{file.fileno()}"
        try:
            kernel: Kernel = cute.runtime.load_module(path, enable_tvm_ffi=True)[SYMBOL]
        except Exception as error:  # noqa: BLE001  the kernel is compiled again
            warnings.warn(f"{disk.folder / name} does not load: {error}", stacklevel=2)
            return None
    return kernel
