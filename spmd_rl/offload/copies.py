"""Copies between a GPU and pinned host memory, on streams of their own, beside computation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]  # destination and source, of equal size and dtype


class Copy:
    """Copies that were started. On a CPU they are done when they start."""

    def __init__(self, began: torch.cuda.Event | None, ended: torch.cuda.Event | None) -> None:
        self._began = began
        self._ended = ended
        self.num_bytes = 0
        self._cpu_s = 0.0

    def wait(self) -> float:
        """Wait until all bytes have arrived, and return the seconds that this took.

        Blocks: the host.
        """
        began = time.perf_counter()
        if self._ended is not None:
            self._ended.synchronize()
        return time.perf_counter() - began

    def order_before(self, stream: torch.cuda.Stream | None) -> None:
        """Have later work of `stream` wait for the copies, without blocking the host."""
        if self._ended is not None and stream is not None:
            stream.wait_event(self._ended)

    @property
    def seconds(self) -> float:
        """The time from the first byte to the last. Blocks: as `wait`."""
        if self._began is None or self._ended is None:
            return self._cpu_s
        self._ended.synchronize()
        return self._began.elapsed_time(self._ended) / 1e3


def copy_out(pairs: Pairs, device: torch.device) -> Copy:
    """Start to copy from `device` to the host, behind the work that is queued there."""
    return _start(pairs, device, _out_stream)


def copy_in(pairs: Pairs, device: torch.device) -> Copy:
    """Start to copy from the host to `device`, behind the work that is queued there."""
    return _start(pairs, device, _in_stream)


def _start(
    pairs: Pairs, device: torch.device, stream_of: Callable[[torch.device], torch.cuda.Stream]
) -> Copy:
    if device.type != "cuda":
        copy, began = Copy(None, None), time.perf_counter()
        _copy_all(pairs)
        copy._cpu_s = time.perf_counter() - began
    else:
        stream = stream_of(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        copy = Copy(*(torch.cuda.Event(enable_timing=True) for _ in range(2)))
        assert copy._began is not None
        assert copy._ended is not None
        with torch.cuda.stream(stream):
            copy._began.record(stream)
            _copy_all(pairs)
            copy._ended.record(stream)
    copy.num_bytes = sum(source.nbytes for _, source in pairs)
    return copy


@torch.no_grad()
def _copy_all(pairs: Pairs) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


@cache
def _out_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def _in_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
