"""What a recorded graph reads of the host."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGN_BYTES = 16

Fields = Mapping[str, tuple[tuple[int, ...], type]]


class GraphInputs:
    """Arrays that a recorded graph reads, in one piece of device memory that one copy fills.

    `fields` gives each array's shape and type; `tensors` are theirs on the device, zero at first.
    """

    def __init__(self, fields: Fields, device: torch.device) -> None:
        self._fields = fields
        num_bytes = sum(_aligned(shape, dtype) for shape, dtype in fields.values())
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.tensors = self._parts(self._memory)

    def upload(self, arrays: Mapping[str, NDArray[Any]], padding: Mapping[str, float]) -> None:
        """Queue a copy of `arrays` [n, ...] to the front of their fields; the rest of each gets its
        padding, else 0.
        """
        staged = torch.empty(len(self._memory), dtype=torch.uint8, pin_memory=True)
        for name, part in self._parts(staged).items():
            host, count = part.numpy(), len(arrays[name])
            host[:count] = arrays[name]
            host[count:] = padding.get(name, 0)
        self._memory.copy_(staged, non_blocking=True)

    def _parts(self, memory: Tensor) -> dict[str, Tensor]:
        parts, start = {}, 0
        for name, (shape, dtype) in self._fields.items():
            size = prod(shape) * np.dtype(dtype).itemsize
            typed = memory[start : start + size].view(torch.from_numpy(np.empty(0, dtype)).dtype)
            parts[name] = typed.view(shape)
            start += _aligned(shape, dtype)
        return parts


def _aligned(shape: tuple[int, ...], dtype: type) -> int:
    return -(-prod(shape) * np.dtype(dtype).itemsize // ALIGN_BYTES) * ALIGN_BYTES
