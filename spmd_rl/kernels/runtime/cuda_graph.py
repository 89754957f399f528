"""Work of a GPU recorded as a CUDA graph, to be replayed without its launches."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

GraphMemory = Any  # torch's handle of a pool
Outputs = TypeVar("Outputs")


def record(
    work: Callable[[], Outputs], memory: GraphMemory
) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    """Do `work` once, which compiles what is not compiled yet, then `capture` it with all of the
    GPU's memory that torch does not need."""
    work()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return capture(work, memory)


def capture(
    work: Callable[[], Outputs], memory: GraphMemory
) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    """`work`, whose kernels are loaded, as a graph; `memory` is shared between graphs that never
    run at the same time.

    Python's collector rests meanwhile: letting go of other graphs or of device memory would end the
    recording. Other threads may allocate, and wait for streams of their own.
    """
    torch.cuda.synchronize()
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.stream(_stream(torch.cuda.current_device())):
            graph.capture_begin(pool=memory, capture_error_mode="thread_local")
            try:
                outputs = work()
            finally:
                graph.capture_end()
    finally:
        if collects:
            gc.enable()
    return graph, outputs


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """One for all recordings: memory that graphs share is reused on the stream that it was taken
    on.
    """
    return torch.cuda.Stream(device)
