"""The GPU kernel of digests over tensors that lie in CPU memory, for Triton's interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.kernels.runtime import copy_triton, digest_triton
from spmd_rl.weights.layout import Box
from spmd_rl.weights.local_tensors import LocalTensor
from spmd_rl.weights.memory_rows import memory_rows


def kernel_sums(
    locals_: list[Tensor], shapes: list[tuple[int, ...]], offsets: list[tuple[int, ...]], to: str
) -> Tensor:
    """Return the digests of some boxes of one dtype, cast to the dtype `to`, in one launch."""
    digest_triton.BLOCK, digest_triton.BLOCKS = 16, 3
    sums = torch.zeros(len(locals_), dtype=torch.int64)
    rows = []
    for number, (local, shape, offset) in enumerate(zip(locals_, shapes, offsets, strict=True)):
        of_box = memory_rows(LocalTensor(shape, Box(offset, tuple(local.shape)), local), number)
        assert of_box is not None
        rows += [digest_triton.Rows(*row) for row in of_box]
    digest_triton.RowDigests(rows, locals_[0].dtype, getattr(torch, to), sums.device).add_to(sums)
    return sums


def copied(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors as bfloat16, between guards that nothing may write."""
    copy_triton.BLOCK, copy_triton.BLOCKS = 16, 3
    wide = [torch.full((one.numel() + 16,), 7.0, dtype=torch.bfloat16) for one in tensors]
    copy_triton.copy_all([(one[8:-8], tensor) for one, tensor in zip(wide, tensors, strict=True)])
    return wide


def through_buffer(tensors: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Copy the tensors to two buffers, which hold them as `dtype`, and from the second to others.

    Return the first buffer and these. All have guards that nothing may write. The first
    copies have fewer programs than chunks.
    """
    copy_triton.BLOCK, copy_triton.BLOCKS = 16, 3
    starts, size = [], 16
    for one in tensors:
        starts.append(size)
        size += -(-one.numel() * dtype.itemsize // 16) * 16
    buffers = [torch.full((size + 16,), 7, dtype=torch.uint8) for _ in range(2)]
    packing = copy_triton.BufferCopies(tensors, starts, dtype, to_buffer=True, max_programs=4)
    for buffer in buffers:
        packing.run(buffer)
    wide = [torch.full((one.numel() + 16,), 7.0, dtype=dtype) for one in tensors]
    targets = [one[8:-8] for one in wide]
    unpacking = copy_triton.BufferCopies(targets, starts, dtype, to_buffer=False, max_programs=100)
    unpacking.run(buffers[1])
    return buffers[0], wide
