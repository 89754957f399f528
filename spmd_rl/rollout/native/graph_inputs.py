"""Inputs of a recorded graph: arrays in one piece of device memory, which one copy fills."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGN_BYTES = 16

InputFields = Mapping[str, tuple[tuple[int, ...], type]]


class GraphInputs:
    """The arrays that a recorded graph reads.

    `fields` gives each array's shape and dtype. `tensors` are the arrays on the device, zero at
    first.
    """

    def __init__(self, fields: InputFields, device: torch.device) -> None:
        self._fields = fields
        num_bytes = sum(_aligned_bytes(shape, dtype) for shape, dtype in fields.values())
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.tensors = self._views(self._memory)

    def upload(self, arrays: Mapping[str, NDArray[Any]], padding: Mapping[str, float]) -> None:
        """Queue a copy of `arrays` [n, ...] to the front of their fields.

        The rest of each field gets its value in `padding`, or 0.
        """
        staging = torch.empty(len(self._memory), dtype=torch.uint8, pin_memory=True)
        for name, view in self._views(staging).items():
            field, count = view.numpy(), len(arrays[name])
            field[:count] = arrays[name]
            field[count:] = padding.get(name, 0)
        self._memory.copy_(staging, non_blocking=True)

    def _views(self, memory: Tensor) -> dict[str, Tensor]:
        """Return a typed view of `memory` for each field."""
        views, start = {}, 0
        for name, (shape, dtype) in self._fields.items():
            size = prod(shape) * np.dtype(dtype).itemsize
            typed = memory[start : start + size].view(torch.from_numpy(np.empty(0, dtype)).dtype)
            views[name] = typed.view(shape)
            start += _aligned_bytes(shape, dtype)
        return views


def _aligned_bytes(shape: tuple[int, ...], dtype: type) -> int:
    num_bytes = prod(shape) * np.dtype(dtype).itemsize
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
