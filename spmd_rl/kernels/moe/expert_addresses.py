"""Addresses of the experts' weights, in a table on the device.

Each weight stays a tensor of its own: a parameter that FSDP shards, a push brings and a file names.
A kernel that is given the table needs no copy of them side by side. An engine's weights stay where
they are, also over sleep, so its recorded graphs read one table. A trainer's weights are gathered
anew for each pass, so its tables are uploaded anew, without waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from spmd_rl.kernels.low_precision.block_codes import BlockCodes, Weight
from spmd_rl.types.code_format import CodeFormat

ALIGN_BYTES = 16  # what one load of a thread takes


@dataclass(frozen=True)
class Addresses:
    """Weights of one shape: `num_parts` of each of `num_experts` experts.

    With `is_aligned`, each weight begins and each of its rows lies at a multiple of 16 bytes.
    Weights in few bits have another table, of their scales, and a `format`.
    Shape: tables [num_parts, num_experts] int64 on the device; `shape` is that of a weight.
    """

    table: Tensor
    shape: tuple[int, int]
    is_aligned: bool
    scales: Tensor | None = None
    format: CodeFormat | None = None

    @property
    def num_parts(self) -> int:
        return self.table.shape[0]

    @property
    def num_experts(self) -> int:
        return self.table.shape[1]


def addresses(parts: Sequence[Sequence[Weight]]) -> Addresses:
    """Return the addresses of parts, each of which has one weight for each expert, or its codes.

    Queues a copy and does not wait. Must not run while a graph is recorded.
    Raises: ValueError for weights of several shapes or devices, or that are not contiguous.
    """
    weights, *scales = map(_checked, _tensors(parts))
    found = _table(_pointers(weights), weights[0][0])
    if not scales:
        return found
    coded = cast(BlockCodes, parts[0][0])
    of_scales = _table(_pointers(scales[0]), scales[0][0][0]).table
    return replace(found, shape=coded.shape, scales=of_scales, format=coded.format)


def _tensors(parts: Sequence[Sequence[Weight]]) -> list[Sequence[Sequence[Tensor]]]:
    """Return the weights; of weights in few bits the codes, and then the scales."""
    if isinstance(parts[0][0], Tensor):
        return [cast(Sequence[Sequence[Tensor]], parts)]
    coded = cast(Sequence[Sequence[BlockCodes]], parts)
    return [
        [[one.codes for one in part] for part in coded],
        [[one.scales for one in part] for part in coded],
    ]


def _checked(parts: Sequence[Sequence[Tensor]]) -> Sequence[Sequence[Tensor]]:
    first = parts[0][0]
    for weight in (one for part in parts for one in part):
        if weight.shape != first.shape or weight.dtype != first.dtype:
            raise ValueError(f"experts' weights of {list(weight.shape)} and {list(first.shape)}")
        if not weight.is_contiguous() or weight.device != first.device:
            raise ValueError("an expert's weight is not contiguous or on another device")
    return parts


def _pointers(parts: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    return [[weight.data_ptr() for weight in part] for part in parts]


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

    def of(self, name: str, parts: Sequence[Sequence[Weight]]) -> Addresses:
        """Return the addresses of `parts`, as `addresses` does.

        Raises: RuntimeError where a weight has moved while a graph is recorded.
        """
        tensors = _tensors(parts)
        found = [one for column in tensors for one in _pointers(column)]
        if name not in self._tables or self._tables[name][0] != found:
            device = tensors[0][0][0].device
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("experts' weights have moved since the run before the recording")
            self._tables[name] = found, addresses(parts)
        return self._tables[name][1]
