"""Digests of many boxes on NVIDIA GPUs: each element is read once, in a single launch.

A box is given as runs: rows of equal length and distance in memory, and in the index of the whole
tensor. The sums are those of weights/proof/digest.py, whose additions may come in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spmd_rl.kernels.runtime import cuda_kernels
from spmd_rl.kernels.runtime.chunks import chunks_of
from spmd_rl.kernels.runtime.upload import upload


class Rows(NamedTuple):
    """Part of a box: `num_rows` rows of `row_size` elements, `stride` elements apart in memory.

    Several rows have less than 2**31 elements together. Element c of row r has the index
    `first + r * index_stride + c` in the whole tensor. Its digest is added to number `box`.
    """

    address: int
    num_rows: int
    row_size: int
    stride: int
    first: int
    index_stride: int
    box: int


def can_digest(dtype: torch.dtype, target: torch.dtype) -> bool:
    """Whether a kernel reads elements of `dtype` as the `target` that a push makes of them."""
    return cuda_kernels.has_cupy() and cuda_kernels.digest_kernel(dtype, target) is not None


class RowDigests:
    """Digests of rows, whose elements are of `dtype`, cast to `target`. Prepared for many launches.

    The memory of the rows has to stay where it is.
    """

    def __init__(
        self, rows: Sequence[Rows], dtype: torch.dtype, target: torch.dtype, device: torch.device
    ) -> None:
        table = np.array(rows, dtype=np.int64)
        chunks = chunks_of(table[:, 1] * table[:, 2], cuda_kernels.DIGEST_CHUNK)
        self._num_chunks = len(chunks)
        self._table, self._chunks = upload(table, device), upload(chunks, device)
        kernel = cuda_kernels.digest_kernel(dtype, target)
        assert kernel is not None, "can_digest says no"
        self._kernel = kernel

    def add_to(self, sums: Tensor) -> None:
        """Add the digest of each row to that of its box. Shape: sums [number of boxes] int64."""
        cuda_kernels.launch(self._kernel, self._num_chunks, (sums, self._table, self._chunks))
