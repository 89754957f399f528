"""Ranks of tests that share the GPUs of a host with fewer GPUs than ranks.

They do so where `SPMD_RL_SHARE_GPUS_IN_TESTS=1` asks for it: ranks that share a GPU take turns, and
most tests have not been tried with it. Elsewhere the tests are skipped.
"""

from __future__ import annotations

import os

import pytest

from spmd_rl.mesh.shared_gpus import RANKS_PER_GPU_ENV

ASKS_ENV = "SPMD_RL_SHARE_GPUS_IN_TESTS"


def can_run(num_ranks: int) -> bool:
    """Whether so many ranks have GPUs of their own here, or may share them."""
    import torch

    return torch.cuda.device_count() >= num_ranks or os.environ.get(ASKS_ENV) == "1"


def sharing(num_ranks: int) -> dict[str, str]:
    """The variables with which so many ranks run on this host; none on CPUs.

    Skips a test that needs more GPUs, unless its ranks may share them.
    """
    import torch

    num_gpus = torch.cuda.device_count()
    if not 0 < num_gpus < num_ranks:
        return {}
    if not can_run(num_ranks):
        pytest.skip(f"needs {num_ranks} GPUs, or {ASKS_ENV}=1")
    return {RANKS_PER_GPU_ENV: str(-(-num_ranks // num_gpus))}


def ranks_of(words: list[str]) -> int:
    """The ranks that the last `--nproc=N` of a command line asks for, else one."""
    asked = [int(word.partition("=")[2]) for word in words if word.startswith("--nproc=")]
    return asked[-1] if asked else 1
