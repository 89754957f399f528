"""torch_memory_saver: unmaps what torch allocates, and maps it again at the same addresses.

This is the only module that imports it. It runs in its torch mode, in which a pool of memory has an
allocator of its own, and without its backups, which copy far slower than the GPU's links.

The library ends the process where a call is not legal or memory runs out, so callers check both
before. It takes one explicit tag at a time here, under one lock.
Source: github.com/fzyzcjy/torch_memory_saver, version 0.0.10.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from spmd_rl.errors import ConfigError
from spmd_rl.offload.ledger import as_size

_LOCK = threading.Lock()
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
RISKY = 1.05  # free memory over what is asked for; below it another process may take the rest

PoolId = tuple[int, int]
Segment = dict[str, Any]  # of torch.cuda.memory_snapshot


@contextmanager
def region(tag: str) -> Iterator[Callable[[], PoolId]]:
    """Have this thread allocate its GPU memory under `tag`, which no other region may have.

    It yields a function that returns torch's pool of this memory. The process ends where a GPU has
    too little left for an allocation.
    Raises: ConfigError where the library is missing, or torch's allocator does not fit.
    """
    with _saver().region(tag=tag, enable_cpu_backup=False):
        yield _current_pool


def segments(pool: PoolId) -> list[Segment]:
    """Return what the pool has of the GPU, by address: one mapping each."""
    found: list[Segment] = torch.cuda.memory_snapshot(pool)
    return sorted(found, key=lambda segment: segment["address"])


def unmap(tag: str) -> None:
    """Give the memory under `tag` back. Nothing may run that uses it."""
    with _LOCK:
        _saver().pause(tag)


def map_again(tag: str, num_bytes: int) -> None:
    """Take the memory under `tag` again. The process ends where there is too little left.

    Where it is close, a line on stderr says what was asked for.
    """
    with _LOCK:
        free = torch.cuda.mem_get_info()[0]
        if free < RISKY * num_bytes:
            print(
                f"waking '{tag}' takes {as_size(num_bytes)} of {as_size(free)} that the GPU has "
                "left; torch_memory_saver ends the process if another process takes them first",
                file=sys.stderr,
                flush=True,
            )
        _saver().resume(tag)


def _current_pool() -> PoolId:
    """Return the pool from which this thread allocates."""
    probe = torch.empty(1, dtype=torch.uint8, device="cuda").data_ptr()
    for segment in torch.cuda.memory_snapshot():
        if 0 <= probe - segment["address"] < segment["total_size"]:
            return tuple(segment["segment_pool_id"])
    raise AssertionError("torch does not list memory that it has just allocated")


@cache
def _saver() -> Any:
    for name in ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in os.environ.get(name, "").lower():
            raise ConfigError(
                f"{name} asks for expandable segments, which cannot sleep: "
                "remove it, or set offload.sleep = 'never'"
            )
    try:
        from torch_memory_saver import torch_memory_saver
    except ImportError as error:
        raise ConfigError(
            "roles that sleep on a GPU need torch_memory_saver, which cannot be imported "
            f"({error}): pip install -e '.[gpu]' in the repository of spmd_rl, or set "
            "offload.sleep = 'never'"
        ) from error
    torch_memory_saver.hook_mode = "torch"
    # It stays until the process is gone. Else Python would free its pools on exit, outside a
    # region, where the library ends the process with code 1.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(torch_memory_saver))
    return torch_memory_saver
