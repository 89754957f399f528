"""Where the time of a step goes on a GPU: matrix products, attention, other kernels, copies, idle.

A kernel's class is told by its name. Idle is the time in which the GPU runs nothing: it waits for
the host to launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.profiler import DeviceType, ProfilerActivity

CLASSES = {  # the first whose part is in a kernel's lower-case name
    "attention": ("flash", "attn", "attention", "fmha"),
    "matrix products": ("gemm", "nvjet", "cutlass", "_matmul"),
}
Span = tuple[float, float]
OTHER, COPIES, IDLE = "other kernels", "copies", "idle"


class Event(NamedTuple):
    """What ran on the GPU, by its name, and when, in microseconds."""

    name: str
    span: Span


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the same time as spans that do not touch, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def class_of(name: str) -> str:
    """Return the class of a kernel, or of a copy or a fill of memory."""
    if name.startswith(("Memcpy", "Memset")):
        return COPIES
    lower = name.lower()
    return next(
        (one for one, parts in CLASSES.items() if any(part in lower for part in parts)), OTHER
    )


def shares(events: Iterable[Event], seconds: float) -> dict[str, float]:
    """Return the seconds of each class, and those of `seconds` in which nothing ran."""
    found = dict.fromkeys((*CLASSES, OTHER, COPIES), 0.0)
    spans = []
    for one in events:
        start, end = one.span
        found[class_of(one.name)] += (end - start) / 1e6
        spans.append(one.span)
    busy = sum(end - start for start, end in union(spans)) / 1e6
    return found | {IDLE: max(seconds - busy, 0.0)}


def gpu_time(step: Callable[[], float]) -> dict[str, float]:
    """Run a step, which returns its seconds, and return the seconds of each class.

    The profiler makes a step longer, mostly by idle time, so idle is an upper bound.
    """
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        seconds = step()
    events = [
        Event(one.name, (one.time_range.start, one.time_range.end))
        for one in found.events() or ()
        if one.device_type == DeviceType.CUDA
    ]
    return shares(events, seconds)
