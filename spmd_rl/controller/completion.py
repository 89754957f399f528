"""Calls in the order in which they end."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

from spmd_rl.controller.pending import Pending

R = TypeVar("R")


class CompletionQueue(Generic[R]):
    """Started calls, handed out as they end. Its length is the number of calls in it.

    Any thread may add calls; one thread at a time waits.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._open: dict[int, Pending[R]] = {}  # by number, the oldest first
        self._lock = threading.Lock()  # held to insert, and to look for the oldest
        self._ended: deque[int] = deque()
        self._is_woken = False

    def __len__(self) -> int:
        return len(self._open)

    def add(self, call: Pending[R]) -> None:
        number = next(self._numbers)
        with self._lock:
            self._open[number] = call
        call.started_call.call_when_done(partial(self._ended.append, number))

    def wait(self, seconds: float | None = None) -> Pending[R] | None:
        """Remove and return the next call that has ended; None if there is none, or after `wake`.

        Blocks: for `seconds` at most, by default until the deadline of the oldest call.
        Raises: DeadlineError when the oldest call is overdue, as `Pending.wait`.
        """
        while True:
            if (call := self._pop_ended()) is not None:
                return call
            with self._lock:
                oldest = next(iter(self._open.values()), None)
            if oldest is None or self._is_woken:
                self._is_woken = False
                return None
            left_s = max(0.0, oldest.started_call.seconds_left)
            wait_s = left_s if seconds is None else min(seconds, left_s)
            if oldest.started_call.handle_until(self._has_news, wait_s):
                continue
            if wait_s < left_s:
                return None
            oldest.wait(0.0)  # raises, unless the call has ended in this moment

    def wake(self) -> None:
        """End the `wait` of another thread, or else the next one."""
        self._is_woken = True
        for call in list(self._open.values())[:1]:
            call.started_call.wake()

    def _has_news(self) -> bool:
        return bool(self._ended) or self._is_woken

    def _pop_ended(self) -> Pending[R] | None:
        while self._ended:
            call = self._open.pop(self._ended.popleft(), None)
            if call is not None:  # else it was told twice
                return call
        return None


def as_completed(calls: Iterable[Pending[Any]]) -> Iterator[Pending[Any]]:
    """Yield started calls as they end. Every call has the run's deadline, from its own start.

    Blocks and raises: as `CompletionQueue.wait`.
    """
    queue: CompletionQueue[Any] = CompletionQueue()
    for call in calls:
        queue.add(call)
    while (ended := queue.wait()) is not None:
        yield ended
