"""Copies of many float32 tensors to bfloat16 on NVIDIA GPUs, in a single launch.

Each element is read and written once. torch's `_foreach_copy_` takes a launch for every 320 blocks.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.runtime.programs import programs_of
from spmd_rl.kernels.runtime.upload import upload

BLOCK = 2048  # elements at once
BLOCKS = 8  # that one program copies
ALIGN_BYTES = 16


def can_copy(target: Tensor, tensor: Tensor) -> bool:
    """Whether `MasterCopies` takes this pair."""
    return (
        target.is_cuda
        and (target.dtype, tensor.dtype) == (torch.bfloat16, torch.float32)
        and target.device == tensor.device
        and target.shape == tensor.shape
        and target.is_contiguous()
        and tensor.is_contiguous()
        and (target.data_ptr() | tensor.data_ptr()) % ALIGN_BYTES == 0
    )


class MasterCopies:
    """Copies of the second tensor of each pair to the first, rounded to bfloat16.

    The tensors are kept, and have to keep their memory.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._pairs = pairs
        runs = [(target.data_ptr(), tensor.data_ptr(), tensor.numel()) for target, tensor in pairs]
        table = np.array(runs, dtype=np.int64)
        programs = programs_of(table[:, 2], BLOCK * BLOCKS)
        self._num_programs = len(programs)
        device = pairs[0][0].device
        self._table, self._programs = upload(table, device), upload(programs, device)

    def run(self) -> None:
        """Queue all copies, in one launch."""
        if self._num_programs:
            _copy[(self._num_programs,)](self._table, self._programs, BLOCK, BLOCKS, num_warps=8)


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy to the first tensor of each pair the second, rounded to bfloat16."""
    MasterCopies(pairs).run()


@triton.jit
def _copy(table, programs, BLOCK: tl.constexpr, BLOCKS: tl.constexpr) -> None:
    program = tl.program_id(0)
    run = table + tl.load(programs + 2 * program) * 3
    begin = tl.load(programs + 2 * program + 1) * (BLOCK * BLOCKS)
    target = tl.multiple_of(tl.load(run).to(tl.pointer_type(tl.bfloat16)), 16)
    tensor = tl.multiple_of(tl.load(run + 1).to(tl.pointer_type(tl.float32)), 16)
    size = tl.load(run + 2)
    for step in range(BLOCKS):
        start = begin + step * BLOCK
        at = start + tl.arange(0, BLOCK)
        if start + BLOCK <= size:  # without a mask, loads and stores are wide
            tl.store(target + at, tl.load(tensor + at).to(tl.bfloat16))
        elif start < size:
            values = tl.load(tensor + at, mask=at < size, other=0.0)
            tl.store(target + at, values.to(tl.bfloat16), mask=at < size)
