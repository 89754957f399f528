"""Train steps whose bits are a function of weights and batch: `trainer.deterministic`.

Our own kernels sum in a fixed order anyhow. What is left to chance, in the backward pass, is
FlashAttention's order of key blocks, torch ops that add atomically, cuBLAS beside other streams,
and how NCCL sums over ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.attention.backend import attention_backend
from spmd_rl.kernels.attention.flash import FLASH_HEAD_DIMS

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
# with any other, cuBLAS may choose another product beside other streams
WORKSPACES = (":4096:8", ":16:8")


def require_deterministic(
    device: torch.device, dtype: torch.dtype, head_dim: int, num_replicas: int
) -> None:
    """Refuse what has no fixed order of sums, and fix cuBLAS's workspace, before its first product.

    Raises: ConfigError with what would have to be otherwise.
    """
    if num_replicas > 1:
        raise ConfigError(
            f"trainer.deterministic: gradients of {num_replicas} replicas are summed in NCCL's or gloo's own order; "
            "use split.train.dp = 1 and the axis fsdp"
        )
    if device.type != "cuda":
        return
    if not attention_backend(head_dim, dtype, device).has_deterministic_backward:
        raise ConfigError(
            f"trainer.deterministic: on a GPU it needs flash-attn-4 on Hopper, trainer.dtype = bfloat16 and heads of "
            f"{', '.join(map(str, FLASH_HEAD_DIMS))}, not {str(dtype).removeprefix('torch.')} and {head_dim}"
        )
    if os.environ.setdefault(WORKSPACE, WORKSPACES[0]) not in WORKSPACES:
        raise ConfigError(
            f"trainer.deterministic: {WORKSPACE}={os.environ[WORKSPACE]}, but it needs {' or '.join(WORKSPACES)}"
        )


@contextmanager
def deterministic(chosen: bool = True) -> Iterator[None]:
    """Within, where `chosen`, torch's ops and FlashAttention (flash.py) sum in a fixed order, or
    raise.
    """
    if not chosen:
        yield
        return
    settings: Any = torch.utils.deterministic
    before, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # we read nothing that is not written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        settings.fill_uninitialized_memory = fill


class SumInRankOrder:
    """FSDP's reduce-scatter as an exchange and a sum on every rank, whatever way NCCL takes. The
    bytes are the same.
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
        """`op` is the sum: fsdp2.py asks for no other."""
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(group.size(), -1), dim=0, out=output_tensor)
