"""torch_memory_saver: unmaps what torch allocates, and maps it again at the same addresses.

This is the only module that imports it. It runs in its torch mode, in which a pool of memory has an
allocator of its own, and without its backups, which copy far slower than the GPU's links.

The library ends the process where a call is not legal or memory runs out, so callers check both
before. It takes one explicit tag at a time here, under one lock.
Source: github.com/fzyzcjy/torch_memory_saver, version 0.0.10.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from spmd_rl.errors import ConfigError

_LOCK = threading.Lock()
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@contextmanager
def region(tag: str) -> Iterator[None]:
    """Have this thread allocate its GPU memory under `tag`, which no other region may have.

    Raises: ConfigError where the library is missing, or torch's allocator does not fit.
    """
    with _saver().region(tag=tag, enable_cpu_backup=False):
        yield


def unmap(tag: str) -> None:
    """Give the memory under `tag` back. Nothing may run that uses it."""
    with _LOCK:
        _saver().pause(tag)


def map_again(tag: str) -> None:
    """Take the memory under `tag` again. The process ends where there is too little left."""
    with _LOCK:
        _saver().resume(tag)


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
            f"({error}): pip install 'spmd-rl[gpu]', or set offload.sleep = 'never'"
        ) from error
    torch_memory_saver.hook_mode = "torch"
    return torch_memory_saver
