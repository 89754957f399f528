"""Work of a GPU recorded as a CUDA graph, to be replayed without its launches."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch

GraphMemory = Any  # torch's handle of a pool
Outputs = TypeVar("Outputs")


def record(work: Callable[[], Outputs], memory: GraphMemory) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    """Do `work` once, which compiles what is not compiled yet, then record it; `memory` is shared between graphs that
    never run at the same time.

    Python's collector rests meanwhile: letting go of other graphs or of device memory would end the recording. Other
    threads may allocate, and wait for streams of their own.
    """
    work()
    torch.cuda.synchronize()
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            outputs = work()
    finally:
        if collects:
            gc.enable()
    return graph, outputs
