"""Memory of a box as rows at equal distances, as the kernel of digests reads it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from spmd_rl.weights.local_tensors import LocalTensor
from spmd_rl.weights.plan.layout import Dims

# address, number of rows, size of a row, distance of rows in memory, index of the first element in
# the tensor, distance of rows in the tensor, number of the box
MemoryRows = tuple[int, int, int, int, int, int, int]
MAX_ELEMENTS = 2**31 - 2**16  # of a matrix whose rows have gaps: it is indexed with 32 bits


def memory_rows(tensor: LocalTensor, box: int) -> list[MemoryRows] | None:
    """Return the memory of a tensor as rows that belong to the box with number `box`.

    It is None where the elements of a row do not lie side by side, or rows with gaps are too long.
    """
    local, shape, offset = tensor.local.detach(), tensor.shape, tensor.box.offset
    if not shape:
        local, shape, offset = local.reshape(1), (1,), (0,)
    if local.shape[-1] > 1 and local.stride(-1) != 1:
        return None
    first = _dot(offset, _index_strides(shape))
    if local.is_contiguous() and local.shape[1:] == torch.Size(shape[1:]):
        return [(local.data_ptr(), 1, local.numel(), 0, first, 0, box)]
    if prod(local.shape[-2:]) > MAX_ELEMENTS:
        return None
    return list(_blocks(local, shape, first, box))


def _blocks(local: Tensor, shape: Dims, first: int, box: int) -> Iterator[MemoryRows]:
    """Yield the rows of each matrix that the last two dims of a box are."""
    *outer, num_rows, row_size = local.shape if local.dim() > 1 else (1, *local.shape)
    strides = _index_strides(shape)
    stride, index_stride = (local.stride(-2), strides[-2]) if local.dim() > 1 else (0, 0)
    for place in itertools.product(*map(range, outer)):
        address = local.data_ptr() + _dot(place, local.stride()) * local.element_size()
        index = first + _dot(place, strides)
        yield address, num_rows, row_size, stride, index, index_stride, box


def _index_strides(shape: Dims) -> list[int]:
    """Return the distance of neighbours along each dim in the index of the whole tensor."""
    return [prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _dot(numbers: Sequence[int], strides: Sequence[int]) -> int:
    return sum(number * stride for number, stride in zip(numbers, strides, strict=False))
