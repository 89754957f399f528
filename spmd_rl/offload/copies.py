"""Copies between a GPU and pinned host memory, on streams of their own, beside computation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]  # destination and source: bytes, one dimension, one size
CHUNK_BYTES = 128 << 20  # other copies of the same direction wait for one chunk at most


class Copy:
    """Copies that were started. On a CPU they are done when they start, and have no events."""

    def __init__(
        self,
        num_bytes: int,
        events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None,
        cpu_s: float = 0.0,
    ) -> None:
        self.num_bytes = num_bytes
        self._events = events
        self._cpu_s = cpu_s

    def wait(self) -> float:
        """Wait until all bytes have arrived, and return the seconds that this took.

        Blocks: the host. On a CPU the copy itself was the wait.
        """
        if self._events is None:
            return self._cpu_s
        began = time.perf_counter()
        self._events[1].synchronize()
        return time.perf_counter() - began

    def order_before(self, stream: torch.cuda.Stream) -> None:
        """Have later work of `stream` wait for the copies, without blocking the host."""
        if self._events is not None:
            stream.wait_event(self._events[1])

    @property
    def seconds(self) -> float:
        """The time from the first byte to the last. Blocks: as `wait`."""
        if self._events is None:
            return self._cpu_s
        began, ended = self._events
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3


def copy_out(pairs: Pairs, device: torch.device) -> Copy:
    """Start to copy from `device` to the host, behind the work that is queued there."""
    return _start(pairs, device, _out_stream)


def copy_in(pairs: Pairs, device: torch.device) -> Copy:
    """Start to copy from the host to `device`, behind the work that is queued there."""
    return _start(pairs, device, _in_stream)


def _start(
    pairs: Pairs, device: torch.device, stream_of: Callable[[torch.device], torch.cuda.Stream]
) -> Copy:
    num_bytes = sum(source.nbytes for _, source in pairs)
    if device.type != "cuda":
        began = time.perf_counter()
        _copy_all(pairs)
        return Copy(num_bytes, cpu_s=time.perf_counter() - began)
    stream = stream_of(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        events[0].record(stream)
        _copy_all(pairs)
        events[1].record(stream)
    return Copy(num_bytes, events)


@torch.no_grad()
def _copy_all(pairs: Pairs) -> None:
    for pair in pairs:
        for target, source in _chunks(*pair):
            target.copy_(source, non_blocking=True)


def _chunks(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(target.split(CHUNK_BYTES), source.split(CHUNK_BYTES), strict=True)


@cache
def _out_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def _in_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
