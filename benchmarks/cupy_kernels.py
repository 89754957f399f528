"""CUDA C++ of the kernels that a push uses, compiled by CuPy: digests of boxes, and copies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spmd_rl.kernels.runtime.chunks import chunks_of
from spmd_rl.kernels.runtime.digest_triton import Rows
from spmd_rl.kernels.runtime.upload import upload

CHUNK, THREADS = 1 << 15, 256
NAMES = {
    "digest": "digest<short, 8, false>",
    "digest masters": "digest<float, 4, true>",
    "copy": "copy<false>",
    "cast": "copy<true>",
}
SOURCE = r"""
typedef unsigned long long u64;
typedef long long i64;
__device__ short as_bf16(float x) {
    short y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
__device__ short bits_of(short x) { return x; }
__device__ short bits_of(float x) { return as_bf16(x); }
__device__ u64 mix(short bits, u64 index) {
    u64 x = index * 0x9E3779B97F4A7C15ull + (u64)(i64)bits * 0xD1342543DE82EF95ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}
template <typename T, int WIDE, bool MASTERS>
__global__ void digest(u64* sums, const i64* table, const i64* programs) {
    const i64* row = table + programs[2 * blockIdx.x] * 7;
    i64 begin = programs[2 * blockIdx.x + 1] * CHUNK;
    const T* memory = (const T*)row[0];
    i64 num_rows = row[1], row_size = row[2], stride = row[3], first = row[4], step = row[5];
    i64 size = num_rows * row_size, end = begin + CHUNK < size ? begin + CHUNK : size;
    u64 total = 0;
    bool wide = row[0] % 16 == 0 && row_size % WIDE == 0 && stride % WIDE == 0;
    if (wide) {
        for (i64 at = begin + (i64)threadIdx.x * WIDE; at < end; at += THREADS * WIDE) {
            int r = num_rows == 1 ? 0 : (int)at / (int)row_size;
            i64 c = num_rows == 1 ? at : at - (i64)r * row_size;
            uint4 loaded = *(const uint4*)(memory + r * stride + c);
            const T* values = (const T*)&loaded;
            u64 index = first + r * step + c;
#pragma unroll
            for (int i = 0; i < WIDE; i++) total += mix(bits_of(values[i]), index + i);
        }
    } else {
        for (i64 at = begin + threadIdx.x; at < end; at += THREADS) {
            i64 r = at / row_size, c = at - r * row_size;
            total += mix(bits_of(memory[r * stride + c]), first + r * step + c);
        }
    }
    for (int away = 16; away; away /= 2) total += __shfl_down_sync(~0u, total, away);
    if (threadIdx.x % 32 == 0) atomicAdd(sums + row[6], total);
}
template <bool CASTS>
__global__ void copy(const i64* table, const i64* chunks) {
    const i64* run = table + chunks[2 * blockIdx.x] * 3;
    i64 begin = chunks[2 * blockIdx.x + 1] * CHUNK, size = run[2];
    i64 end = begin + CHUNK < size ? begin + CHUNK : size;
    short* target = (short*)run[0];
    const short* same = (const short*)run[1];
    const float* masters = (const float*)run[1];
    for (i64 at = begin + (i64)threadIdx.x * 8; at < end; at += THREADS * 8) {
        if (at + 8 <= end) {
            if (CASTS) {
                float4 a = *(const float4*)(masters + at), b = *(const float4*)(masters + at + 4);
                short out[8] = {as_bf16(a.x), as_bf16(a.y), as_bf16(a.z), as_bf16(a.w),
                                as_bf16(b.x), as_bf16(b.y), as_bf16(b.z), as_bf16(b.w)};
                *(uint4*)(target + at) = *(uint4*)out;
            } else {
                *(uint4*)(target + at) = *(const uint4*)(same + at);
            }
        } else {
            for (i64 i = at; i < end; i++) target[i] = CASTS ? as_bf16(masters[i]) : same[i];
        }
    }
}
"""


@cache
def _module() -> Any:
    import cupy

    options = ("--std=c++17", f"-DCHUNK={CHUNK}ll", f"-DTHREADS={THREADS}")
    return cupy.RawModule(code=SOURCE, options=options, name_expressions=list(NAMES.values()))


class _Launch:
    """One kernel with its arguments, on torch's current stream."""

    def __init__(self, name: str, num_blocks: int, *tensors: Tensor) -> None:
        self._kernel, self._num_blocks = _module().get_function(NAMES[name]), num_blocks
        self._tensors = tensors

    def __call__(self, *first: Tensor) -> None:
        import cupy

        addresses = tuple(np.uint64(one.data_ptr()) for one in (*first, *self._tensors))
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            self._kernel((self._num_blocks,), (THREADS,), addresses)


class CupyDigests:
    """`RowDigests` in CUDA C++."""

    def __init__(
        self, rows: Sequence[Rows], dtype: torch.dtype, target: torch.dtype, device: torch.device
    ) -> None:
        table = np.array(rows, dtype=np.int64)
        programs = chunks_of(table[:, 1] * table[:, 2], CHUNK)
        name = "digest" if dtype == target else "digest masters"
        self._launch = _Launch(name, len(programs), upload(table, device), upload(programs, device))

    def add_to(self, sums: Tensor) -> None:
        self._launch(sums)


class CupyCopies:
    """`MasterCopies`, or copies of bfloat16, in CUDA C++."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._pairs = pairs
        runs = [(target.data_ptr(), tensor.data_ptr(), tensor.numel()) for target, tensor in pairs]
        table, device = np.array(runs, dtype=np.int64), pairs[0][0].device
        chunks = chunks_of(table[:, 2], CHUNK)
        name = "cast" if pairs[0][1].dtype == torch.float32 else "copy"
        self._launch = _Launch(name, len(chunks), upload(table, device), upload(chunks, device))

    def run(self) -> None:
        self._launch()


def view_of(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """Return GPU memory as a tensor, over CuPy's memory that it does not own."""
    import cupy

    memory = cupy.cuda.UnownedMemory(address, num_bytes, None, device.index or 0)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return torch.from_dlpack(cupy.ndarray((num_bytes,), cupy.uint8, pointer))
