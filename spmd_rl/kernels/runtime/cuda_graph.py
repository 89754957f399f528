"""Recording of GPU work as a CUDA graph, to be replayed without its launches."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

GraphMemory = Any  # torch's handle of a pool
Outputs = TypeVar("Outputs")


def record(
    work: Callable[[], Outputs],
    memory: GraphMemory,
    rehearsal: Callable[[], object] | None = None,
) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    """Run `work` once, so that its kernels are compiled, then `capture` it.

    A `rehearsal` is run in its place: it needs the same kernels, but waits for no other rank.
    All GPU memory that torch does not need is freed for the graph.
    """
    (rehearsal or work)()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return capture(work, memory)


def capture(
    work: Callable[[], Outputs], memory: GraphMemory
) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    """Record `work`, whose kernels are loaded, as a graph.

    `memory` is shared between graphs that never run at the same time. Python's garbage collector is
    off meanwhile, because freeing other graphs or device memory would end the recording. Other
    threads may allocate, and wait for streams of their own.
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
    """Return the one stream of all recordings, as graphs' shared memory is reused on one stream."""
    return torch.cuda.Stream(device)
