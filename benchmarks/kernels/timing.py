"""Times of kernels between CUDA events: of calls, and of ops that a graph runs for many inputs; several in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd_rl.kernels.recording import record

ROUNDS = 16  # over the inputs, so that a graph runs for 1 ms and its launch, some 8 us, is no part of the result
WARM_UP, REPLAYS = 5, 15
COPY_BYTES = 4 << 30
Op = Callable[[Any], object]


def seconds(works: Sequence[Callable[[], object]], runs: int, warm_up: int) -> list[float]:
    """Median time of each between two events, in turns."""
    times: list[list[float]] = [[] for _ in works]
    for run in range(warm_up + runs):
        for work, found in zip(works, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            if run >= warm_up:
                found.append(start.elapsed_time(end) * 1e-3)
    return [statistics.median(found) for found in times]


def in_turns(ops: Sequence[Op], inputs: list[Any], rounds: int = ROUNDS, runs: int = REPLAYS) -> list[float]:
    """Median microseconds of each for one input."""
    replays = [_recorded(op, inputs, rounds).replay for op in ops]
    return [1e6 * one / (rounds * len(inputs)) for one in seconds(replays, runs, WARM_UP)]


def microseconds(op: Op, inputs: list[Any], rounds: int = ROUNDS) -> float:
    """Median time of `op` for one input, with no other in turn."""
    return in_turns([op], inputs, rounds)[0]


def copy_bytes_per_s() -> float:
    """What a copy of 4 GiB, timed by itself, reads and writes in a second: the median of twenty."""
    source = torch.randn(COPY_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds([lambda: target.copy_(source)], runs=20, warm_up=2)[0]


def _recorded(op: Op, inputs: list[Any], rounds: int) -> torch.cuda.CUDAGraph:
    def work() -> None:
        for one in inputs * rounds:
            op(one)

    return record(work, torch.cuda.graph_pool_handle())[0]
