"""Times of kernels between CUDA events, of calls and of recorded ops, which may take turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd_rl.kernels.runtime.cuda_graph import record
from spmd_rl.kernels.runtime.interleaved_timing import seconds

# over the inputs, so that a graph runs for 1 ms and its launch, some 8 us, is no part of the result
ROUNDS = 16
WARM_UP, REPLAYS = 5, 25
COPY_BYTES = 4 << 30
Op = Callable[[Any], object]


def in_turns(
    ops: Sequence[Op], inputs: list[Any], rounds: int = ROUNDS, turns: int = REPLAYS
) -> list[float]:
    """Return the median microseconds of each for one input."""
    replays = [_recorded(op, inputs, rounds).replay for op in ops]
    return [1e6 * one / (rounds * len(inputs)) for one in seconds(replays, turns, WARM_UP)]


def microseconds(op: Op, inputs: list[Any], rounds: int = ROUNDS) -> float:
    """Return the median time of `op` for one input, measured without others in turn."""
    return in_turns([op], inputs, rounds)[0]


def copy_bytes_per_s() -> float:
    """Return the bytes that a copy of 4 GiB reads and writes in a second: a median of twenty."""
    source = torch.randn(COPY_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds([lambda: target.copy_(source)], turns=20, warm_up=2)[0]


def _recorded(op: Op, inputs: list[Any], rounds: int) -> torch.cuda.CUDAGraph:
    def work() -> None:
        for one in inputs * rounds:
            op(one)

    return record(work, torch.cuda.graph_pool_handle())[0]
