"""Addresses of the experts' weights, in a table on the device.

Each weight stays a tensor of its own: a parameter that FSDP shards, a push brings and a file names.
A kernel that is given the table needs no copy of them side by side. An engine's weights stay where
they are, also over sleep, so its recorded graphs read one table. A trainer's weights are gathered
anew for each pass, so its tables are uploaded anew, without waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGN_BYTES = 16  # what one load of a thread takes


@dataclass(frozen=True)
class Addresses:
    """Weights of one shape: `num_parts` of each of `num_experts` experts.

    With `is_aligned`, each weight begins and each of its rows lies at a multiple of 16 bytes.
    Shape: table [num_parts, num_experts] int64 on the device; `shape` is that of a weight.
    """

    table: Tensor
    shape: tuple[int, int]
    is_aligned: bool

    @property
    def num_parts(self) -> int:
        return self.table.shape[0]

    @property
    def num_experts(self) -> int:
        return self.table.shape[1]


def addresses(parts: Sequence[Sequence[Tensor]]) -> Addresses:
    """Return the addresses of parts, each of which has one weight for each expert.

    Queues a copy and does not wait. Must not run while a graph is recorded.
    Raises: ValueError for weights of several shapes or devices, or that are not contiguous.
    """
    first = parts[0][0]
    for weight in (one for part in parts for one in part):
        if weight.shape != first.shape or weight.dtype != first.dtype:
            raise ValueError(f"experts' weights of {list(weight.shape)} and {list(first.shape)}")
        if not weight.is_contiguous() or weight.device != first.device:
            raise ValueError("an expert's weight is not contiguous or on another device")
    return _table([[weight.data_ptr() for weight in part] for part in parts], first)


def _table(found: Sequence[Sequence[int]], like: Tensor) -> Addresses:
    n, k = like.shape
    table = torch.tensor(found, dtype=torch.int64)
    if like.device.type != "cpu":
        table = table.pin_memory().to(like.device, non_blocking=True)
    is_aligned = all(one % ALIGN_BYTES == 0 for part in found for one in part)
    return Addresses(table, (n, k), is_aligned and k * like.element_size() % ALIGN_BYTES == 0)


class KeptAddresses:
    """Tables of a layer's weights, by name: each is made again when a weight of it has moved."""

    def __init__(self) -> None:
        self._tables: dict[str, tuple[list[list[int]], Addresses]] = {}

    def of(self, name: str, parts: Sequence[Sequence[Tensor]]) -> Addresses:
        """Return the addresses of `parts`, as `addresses` does.

        Raises: RuntimeError where a weight has moved while a graph is recorded.
        """
        found = [[weight.data_ptr() for weight in part] for part in parts]
        if name not in self._tables or self._tables[name][0] != found:
            device = parts[0][0].device
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("experts' weights have moved since the run before the recording")
            self._tables[name] = found, addresses(parts)
        return self._tables[name][1]
