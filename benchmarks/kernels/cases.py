"""A case of the benchmarks of small ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.timing import ROUNDS

Op = Callable[..., object]


class Case(NamedTuple):
    """An op beside torch's: both take the tensors of `inputs()` and move `num_bytes` at least."""

    what: str
    ours: Op
    torch: Op
    inputs: Callable[[], tuple[Tensor, ...]]
    num_bytes: int
    rounds: int = ROUNDS


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
