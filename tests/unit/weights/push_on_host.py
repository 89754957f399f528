"""push_kernels.cu as C++ on the CPU: thread after thread, in chunks of a few elements."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

from spmd_rl.kernels.runtime import cuda_kernels

COMPILER = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
# a digest's chunk holds three words of bytes; neither fits the tests' sizes
SIZES = {"THREADS": 4, "DIGEST_CHUNK": 48, "COPY_CHUNK": 48}
PRELUDE = """
#define __device__
#define __global__
struct Index { unsigned x; };
static Index blockIdx, threadIdx, gridDim;
struct alignas(16) uint4 { unsigned x, y, z, w; };
"""
RUN = """
template <typename... Args>
static void run(unsigned num_blocks, void (*kernel)(Args...), Args... args) {
    gridDim.x = num_blocks;
    for (blockIdx.x = 0; blockIdx.x < num_blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < THREADS; threadIdx.x++) kernel(args...);
}
"""
DIGEST = "u64* a, const i64* b, const i64* c", "a, b, c"
COPY = "const i64* a, const i64* b, i64 c, i64 d, i64 e", "a, b, c, d, e"


class HostKernels:
    """The kernels by name, and the sizes of their launches. `folder` gets the compiled code."""

    def __init__(self, folder: Path) -> None:
        self._symbols = {name: f"kernel_{n}" for n, name in enumerate(cuda_kernels.names())}
        self.num_blocks: list[int] = []
        source, library = folder / "push_kernels.cpp", folder / "push_kernels.so"
        source.write_text(self._source())
        sizes = [f"-D{name}={size}" for name, size in SIZES.items()]
        options = ["-std=c++17", "-O1", "-fno-strict-aliasing", "-shared", "-fPIC", "-w"]
        command = [str(COMPILER), *options, *sizes, str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        self._library = ctypes.CDLL(str(library))

    def _source(self) -> str:
        parts = [PRELUDE, f'#include "{cuda_kernels.SOURCE}"\n', RUN]
        for name, symbol in self._symbols.items():
            parameters, arguments = DIGEST if name.startswith("digest") else COPY
            parts.append(
                f'extern "C" void {symbol}(unsigned n, {parameters}) '
                f"{{ run(n, &{name}, {arguments}); }}\n"
            )
        return "".join(parts)

    def launch(
        self, kernel: str, num_blocks: int, tensors: Sequence[Tensor], numbers: Sequence[int] = ()
    ) -> None:
        self.num_blocks.append(num_blocks)
        arguments = [one.data_ptr() for one in tensors] + list(numbers)
        self._library[self._symbols[kernel]](
            ctypes.c_uint(num_blocks), *map(ctypes.c_int64, arguments)
        )

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have launches run here."""
        monkeypatch.setattr(cuda_kernels, "launch", self.launch)
        for name in ("DIGEST_CHUNK", "COPY_CHUNK"):
            monkeypatch.setattr(cuda_kernels, name, SIZES[name])
