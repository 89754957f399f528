"""Copies of many tensors on NVIDIA GPUs in a single launch: float32 to bfloat16, or as they are.

Each element is read and written once. torch's `_foreach_copy_` takes a launch for every 320 blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spmd_rl.kernels.runtime import cuda_kernels
from spmd_rl.kernels.runtime.chunks import chunks_of
from spmd_rl.kernels.runtime.upload import upload

ALIGN_BYTES = 16
NCCL_BLOCKS = 32  # of a transfer, at most; each takes a multiprocessor


def can_copy(target: Tensor, tensor: Tensor) -> bool:
    """Whether `MasterCopies` takes this pair."""
    return (
        cuda_kernels.has_cupy()
        and (target.dtype, tensor.dtype) == (torch.bfloat16, torch.float32)
        and target.device == tensor.device
        and target.shape == tensor.shape
        and _is_run(target)
        and _is_run(tensor)
    )


def _is_run(tensor: Tensor) -> bool:
    """Whether a tensor lies on a GPU without gaps, and begins where wide loads can."""
    return tensor.is_cuda and tensor.is_contiguous() and tensor.data_ptr() % ALIGN_BYTES == 0


class MasterCopies:
    """Copies of the second tensor of each pair to the first, rounded to bfloat16.

    The tensors are kept, and have to keep their memory.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._pairs = pairs
        runs = [(target.data_ptr(), tensor.data_ptr(), tensor.numel()) for target, tensor in pairs]
        self._runs = _Runs(runs, (torch.bfloat16, torch.float32), pairs[0][0].device)

    def run(self) -> None:
        """Queue all copies, in one launch."""
        self._runs.copy(0, 0)


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy to the first tensor of each pair the second, rounded to bfloat16."""
    MasterCopies(pairs).run()


def can_use_buffer(tensor: Tensor, dtype: torch.dtype, to_buffer: bool) -> bool:
    """Whether `BufferCopies` takes this tensor, for a buffer that holds it as `dtype`."""
    return (
        cuda_kernels.has_cupy()
        and (dtype, tensor.dtype) in cuda_kernels.COPIES
        and (to_buffer or dtype == tensor.dtype)
        and _is_run(tensor)
    )


def programs_beside_nccl(device: torch.device) -> int:
    """Return how many programs a copy may have that is to run beside transfers of NCCL.

    Each takes one multiprocessor. If a copy has them all, a transfer waits for its end: the two
    take as long as one after the other.
    """
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return max(count - NCCL_BLOCKS, count // 2)


class BufferCopies:
    """Copies between tensors and a buffer on their GPU, which is another one in each run.

    `starts` says where each tensor's part begins in the buffer, in bytes; it is a multiple of 16.
    The buffer holds the tensors as `dtype`. They have one dtype; they are kept, and have to keep
    their memory. A launch has at most `max_programs`.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        starts: Sequence[int],
        dtype: torch.dtype,
        to_buffer: bool,
        max_programs: int,
    ) -> None:
        self._tensors, self._to_buffer = tensors, to_buffer
        runs = [
            (start, tensor.data_ptr(), tensor.numel())
            if to_buffer
            else (tensor.data_ptr(), start, tensor.numel())
            for tensor, start in zip(tensors, starts, strict=True)
        ]
        dtypes, device = (dtype, tensors[0].dtype), tensors[0].device
        self._runs = _Runs(runs, dtypes, device, max_programs)

    def run(self, buffer: Tensor) -> None:
        """Queue all copies, in one launch."""
        if self._to_buffer:
            self._runs.copy(buffer.data_ptr(), 0)
        else:
            self._runs.copy(0, buffer.data_ptr())


class _Runs:
    """Runs of elements to copy: where each goes to, where it comes from, and its size."""

    def __init__(
        self,
        runs: Sequence[tuple[int, int, int]],
        dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device,
        max_programs: int | None = None,
    ) -> None:
        table = np.array(runs, dtype=np.int64)
        chunks = chunks_of(table[:, 2], cuda_kernels.COPY_CHUNK)
        self._num_chunks = len(chunks)
        self._num_programs = min(len(chunks), max_programs or len(chunks))
        self._table, self._chunks = upload(table, device), upload(chunks, device)
        self._kernel = cuda_kernels.COPIES[dtypes]

    def copy(self, target_base: int, tensor_base: int) -> None:
        """Copy all runs. Their ends are addresses from these bases, in bytes."""
        if self._num_programs:
            numbers = self._num_chunks, target_base, tensor_base
            tables = self._table, self._chunks
            cuda_kernels.launch(self._kernel, self._num_programs, tables, numbers)
