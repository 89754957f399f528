"""Environment of a program that a rank starts, which must not take itself for a rank."""

from __future__ import annotations

from collections.abc import Mapping

# variables of torchrun and of the trainer, which would misdirect the torch of such a program
SCRUBBED = (
    "TORCHELASTIC_",
    "TORCH_NCCL_",
    "TORCH_FR_",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "OMP_NUM_THREADS",
    "NCCL_",
    "SGLANG_DP_RANK",
    "SGLANG_USE_PICKLE_IPC",
    "LD_PRELOAD",
)


def without_world(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of the world that this process is a rank of."""
    return {name: value for name, value in environment.items() if not name.startswith(SCRUBBED)}
