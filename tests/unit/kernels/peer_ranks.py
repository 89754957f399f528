"""Ranks that share memory, for Triton's interpreter: threads of one process.

One rank runs at a time, from one barrier to the next, in any order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric


class Turns:
    """Which rank runs: each until it waits for all others."""

    def __init__(self, num_ranks: int) -> None:
        self.running = threading.Lock()
        self._barrier = threading.Barrier(num_ranks)
        self.memory: list[Tensor] = []

    def barrier(self, channel: int = 0) -> None:
        self.running.release()
        try:
            self._barrier.wait()
        finally:
            self.running.acquire()

    def end(self) -> None:
        """Have all ranks fail that wait, or will."""
        self._barrier.abort()

    def rendezvous(self, memory: Tensor, group: Any) -> Any:
        self.memory.append(memory)
        self.barrier()
        pointers = [one.data_ptr() for one in self.memory]
        return SimpleNamespace(buffer_ptrs=pointers, barrier=self.barrier)


def on_ranks(run: Callable[[Any], Tensor], num_ranks: int) -> Tensor:
    """Run `run(group)` on each rank, and return what all of them return. Shape: [P, ...]."""
    turns = Turns(num_ranks)
    found: list[Tensor] = [torch.empty(0)] * num_ranks
    symmetric.empty = lambda *size, dtype, device: torch.empty(size, dtype=dtype)
    symmetric.rendezvous = turns.rendezvous
    torch.cuda.current_device = lambda: 0
    failed: list[BaseException] = []
    order = [threading.Event() for _ in range(num_ranks + 1)]

    def of_rank(rank: int) -> None:
        order[rank].wait()
        turns.running.acquire()
        order[rank + 1].set()
        try:
            found[rank] = run(SimpleNamespace(rank=lambda: rank, size=lambda: num_ranks))
        except BaseException as error:
            failed.append(error)
            turns.end()
        turns.running.release()

    ranks = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(num_ranks)]
    for one in ranks:
        one.start()
    order[0].set()
    for one in ranks:
        one.join()
    if failed:
        raise failed[0]
    return torch.stack(found)
