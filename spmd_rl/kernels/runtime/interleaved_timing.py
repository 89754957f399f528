"""Timing of several pieces of GPU work that take turns, in a new order each turn.

A GPU at its power limit lowers its clock, and what ran before decides by how much. In a fixed
order, the same kernel measured twice among others differed by up to 6 % on an H200.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence

import torch


def seconds(works: Sequence[Callable[[], object]], turns: int, warm_up: int) -> list[float]:
    """Return each one's median time between two events, without the first `warm_up` turns."""
    times: list[list[float]] = [[] for _ in works]
    for turn, index in shuffled_turns(len(works), warm_up + turns):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        works[index]()
        end.record()
        end.synchronize()
        if turn >= warm_up:
            times[index].append(begin.elapsed_time(end) * 1e-3)
    return [statistics.median(found) for found in times]


def shuffled_turns(count: int, turns: int) -> Iterator[tuple[int, int]]:
    """Yield (turn, index), each index below `count` once a turn; the same orders in each call."""
    draw = random.Random(0)
    for turn in range(turns):
        for index in draw.sample(range(count), count):
            yield turn, index
