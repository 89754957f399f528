"""Ranks of tests that share the GPUs of a host with fewer GPUs than ranks."""

from __future__ import annotations

from spmd_rl.mesh.shared_gpus import RANKS_PER_GPU_ENV


def sharing(num_ranks: int) -> dict[str, str]:
    """The variables with which so many ranks run on this host; none on CPUs."""
    import torch

    num_gpus = torch.cuda.device_count()
    if not 0 < num_gpus < num_ranks:
        return {}
    return {RANKS_PER_GPU_ENV: str(-(-num_ranks // num_gpus))}


def ranks_of(words: list[str]) -> int:
    """The ranks that the last `--nproc=N` of a command line asks for, else one."""
    asked = [int(word.partition("=")[2]) for word in words if word.startswith("--nproc=")]
    return asked[-1] if asked else 1
