"""Ranks that share the GPUs of their host: a layout of more ranks than GPUs, to be tried.

NCCL refuses two ranks of one host on one GPU, so those that share it say that they are on other
hosts. It then takes sockets between them. Each rank has its part of a GPU's memory.
"""

from __future__ import annotations

import os

from spmd_rl.errors import ConfigError

RANKS_PER_GPU_ENV = "SPMD_RL_RANKS_PER_GPU"


def ranks_per_gpu() -> int:
    """Return how many ranks may share a GPU: 1, or as the environment says.

    Raises: ConfigError where it says no number.
    """
    text = os.environ.get(RANKS_PER_GPU_ENV, "1")
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(f"{RANKS_PER_GPU_ENV}={text}: expected a number of ranks, 1 or more")
    return int(text)


def refuse_shared_gpus(setting: str) -> None:
    """Raise a ConfigError where ranks may share a GPU, which does not go with `setting`."""
    if ranks_per_gpu() > 1:
        raise ConfigError(f"{setting} needs a GPU for each rank: unset {RANKS_PER_GPU_ENV}")


def gpu_of(local_rank: int, local_size: int, num_gpus: int) -> int:
    """Return the GPU of one of the `local_size` ranks of a host.

    Raises: ConfigError where there are more ranks than may share the GPUs.
    """
    if local_size > num_gpus * ranks_per_gpu():
        gpus = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
        raise ConfigError(
            f"{local_size} ranks are more than the {gpus} of this host: set --nproc, or "
            f"{RANKS_PER_GPU_ENV}={-(-local_size // num_gpus)} to try this layout with ranks that "
            "share GPUs"
        )
    return local_rank % num_gpus


def variables_of_sharing(
    host: str, local_rank: int, num_gpus: int, is_only_host: bool
) -> dict[str, str]:
    """Return what NCCL and torch's symmetric memory must read before ranks of `host` share GPUs.

    Ranks that share no GPU stay on one host for NCCL.
    """
    loopback = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"} if is_only_host else {}
    return {
        "NCCL_HOSTID": f"{host}, {local_rank // num_gpus}",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        **loopback,
    }
