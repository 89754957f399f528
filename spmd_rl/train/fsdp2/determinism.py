"""Deterministic train steps (`trainer.deterministic`): the same weights and batch give equal bits.

Our own kernels always sum in a fixed order. Four things in the backward pass do not: the order of
key blocks in FlashAttention, torch ops that add atomically, cuBLAS beside other streams, and NCCL.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.attention.backend import attention_backend
from spmd_rl.kernels.attention.flash import FLASH_HEAD_DIMS
from spmd_rl.kernels.runtime.neighbour_sums import sum_neighbours

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
# with any other workspace, cuBLAS may choose another GEMM beside other streams
WORKSPACES = (":4096:8", ":16:8")


def require_deterministic(
    device: torch.device, dtype: torch.dtype, head_size: int, latent_dim: int = 0
) -> None:
    """Check that every sum has a fixed order, and fix cuBLAS's workspace before its first GEMM.

    Raises: ConfigError with the setting to change.
    """
    if device.type != "cuda":
        return
    backend = attention_backend(head_size, dtype, device, latent_dim=latent_dim)
    if not backend.has_deterministic_backward:
        sizes = ", ".join(map(str, FLASH_HEAD_DIMS))
        raise ConfigError(
            "trainer.deterministic: on a GPU it needs flash-attn-4 on Hopper, trainer.dtype = "
            f"bfloat16 and heads of {sizes}, "
            f"not {str(dtype).removeprefix('torch.')} and {head_size}"
        )
    if os.environ.setdefault(WORKSPACE, WORKSPACES[0]) not in WORKSPACES:
        raise ConfigError(
            f"trainer.deterministic: {WORKSPACE} is {os.environ[WORKSPACE]}, "
            f"but must be {' or '.join(WORKSPACES)}"
        )


@contextmanager
def deterministic(enabled: bool = True) -> Iterator[None]:
    """Have torch's ops and FlashAttention sum in a fixed order within, or raise; if `enabled`."""
    if not enabled:
        yield
        return
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # no code reads memory before writing it
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        settings.fill_uninitialized_memory = fill


class SumInRankOrder:
    """FSDP's reduce-scatter as an all-to-all and a sum on every rank, neighbours first.

    So experts that some neighbours share have the sums of those that each rank has. It moves as
    many bytes as NCCL's.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Sum over the ranks, which is the only `op` that fsdp2.py asks for."""
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        output_tensor.copy_(sum_neighbours(parts.view(group.size(), -1).unbind()))


def sum_gradients(units: Sequence[FSDPModule], deterministic: bool) -> None:
    """Have gradients summed and not averaged: losses are divided by the batch's denominator."""
    for unit in units:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        if deterministic:
            unit.set_custom_reduce_scatter(cast(Any, SumInRankOrder()))
