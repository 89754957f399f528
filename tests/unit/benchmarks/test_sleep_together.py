"""Processes of benchmarks/sleep_together.py copy alone in turn, and then all at once."""

from __future__ import annotations

import multiprocessing
from functools import partial
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event

import pytest
from torch.multiprocessing import ProcessRaisedException

from benchmarks.region_copies import COPY_TURNS
from benchmarks.sleep_together import (
    LOADED,
    PINNED_IN,
    PINNED_OUT,
    SAVED,
    WHOLE,
    Copies,
    Measured,
    on_every_gpu,
    rows_of,
)

NUM_PROCESSES, COPIES_ALONE = 2, 2 * (1 + COPY_TURNS)


def watched_copies(number: int, num_ended: Synchronized[int], last_is_ready: Event) -> Copies:
    """Return two copies, which fail where they begin before they may.

    Their rates are how many copies this process has begun. The last process is ready first.
    """
    num_begun = 0
    if number == NUM_PROCESSES - 1:
        last_is_ready.set()
    last_is_ready.wait()

    def copy() -> float:
        nonlocal num_begun
        num_begun += 1
        if num_begun <= COPIES_ALONE:
            assert num_ended.value == number * COPIES_ALONE + num_begun - 1, "it is not alone"
        else:
            assert num_ended.value >= NUM_PROCESSES * (num_begun - 1), "another one is behind"
        with num_ended.get_lock():
            num_ended.value += 1
        return 1000 * number + num_begun

    return [lambda: {"one": copy()}, lambda: {"two": copy()}]


def copies_of_the_first(number: int) -> Copies:
    assert number == 0, "there is no other GPU"
    return []


@pytest.mark.dist
def test_processes_copy_alone_in_turn_and_then_at_once() -> None:
    context = multiprocessing.get_context("spawn")
    num_ended, last_is_ready = context.Value("i", 0), context.Event()
    make = partial(watched_copies, num_ended=num_ended, last_is_ready=last_is_ready)
    found = on_every_gpu(NUM_PROCESSES, make)
    assert num_ended.value == 2 * NUM_PROCESSES * COPIES_ALONE
    assert found == [
        Measured(
            alone={"one": 1000 * number + 7, "two": 1000 * number + 8},
            at_once={"one": 1000 * number + 19, "two": 1000 * number + 20},
        )
        for number in range(NUM_PROCESSES)
    ]


@pytest.mark.dist
def test_a_process_that_fails_ends_the_others() -> None:
    with pytest.raises(ProcessRaisedException, match="there is no other GPU"):
        on_every_gpu(NUM_PROCESSES, copies_of_the_first)


def gpu(saved: float, pinned: float) -> Measured:
    """Return what one GPU measures whose bytes come back without delay."""
    at_once = {SAVED: saved, SAVED + WHOLE: 0.8 * saved, LOADED: 50.0, LOADED + WHOLE: 45.0}
    pinned_copies = {PINNED_OUT: pinned, PINNED_IN: 50.0}
    alone = {SAVED: 54.0, LOADED: 54.0, PINNED_OUT: 55.0, PINNED_IN: 55.0}
    return Measured(alone, at_once | pinned_copies)


@pytest.mark.parametrize(
    ("slowest", "holds"), [(46.0, [True, True]), (44.0, [True, False]), (50.0, [True, True])]
)
def test_the_median_and_the_slowest_gpu_have_bars(slowest: float, holds: list[bool]) -> None:
    rows = list(rows_of([gpu(49.0, 50.0), gpu(slowest, 50.0), gpu(48.0, 50.0)]))
    barred = [row for row in rows if row.bar]
    assert [row.holds for row in barred] == [*holds, True, True]
    assert [row.value for row in barred] == [
        sorted([49.0, slowest, 48.0])[1],
        min(slowest, 48.0),
        50.0,
        50.0,
    ]
    ratios = {(row.what.partition(": ")[2], row.peer): row.ratio for row in rows}
    assert ratios["pinned copy out, median GPU", "each GPU alone"] == 0.9091
    assert len(ratios) == len(rows) == 10
