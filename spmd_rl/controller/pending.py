"""Pending: a call that was started, whose value can be waited for; and calls in the order in which
they end.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

R = TypeVar("R")


class StartedCall:
    """What a `Pending` asks of the call that it stands for. This one has ended already."""

    done = True

    @property
    def seconds_left(self) -> float:
        """The time to the call's deadline."""
        return 0.0

    def abort(self) -> None:
        """Ask the call's ranks to end it early."""

    def call_when_done(self, listener: Callable[[], object]) -> None:
        """Call `listener` once, when the call has ended, on any thread."""
        listener()

    def wake(self) -> None:
        """Have whoever is in `handle_until` look again."""

    def handle_until(self, done: Callable[[], object], seconds: float) -> bool:
        """Handle what arrives from workers until `done()`, for `seconds` at most."""
        return bool(done())


ENDED_CALL = StartedCall()


class Pending(Generic[R]):
    """The value of a call that may not have finished yet."""

    def __init__(self, finish: Callable[[float | None], R], call: StartedCall = ENDED_CALL) -> None:
        self.started_call = call
        self._finish = finish
        self._value: list[R] = []

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once, or raise."""
        return self.started_call.done

    def wait(self, deadline_s: float | None = None) -> R:
        """Return the call's value, the same object each time.

        Blocks: until every rank has answered; `deadline_s` ends it, or else the run's deadline.
        Raises: DeadlineError, LostRankError, ContractError, or what the endpoint raised.
        """
        if not self._value:
            self._value.append(self._finish(deadline_s))
        return self._value[0]

    def abort(self) -> None:
        """Ask for an early end, and return at once: `wait` then gives what there is so far.

        A call whose endpoint cannot end early goes on.
        """
        self.started_call.abort()


class CompletionQueue(Generic[R]):
    """Started calls, handed out as they end. Its length is the number of calls in it.

    Any thread may add calls; one thread at a time waits.
    """

    def __init__(self) -> None:
        self._open: dict[Pending[R], None] = {}  # the oldest first
        self._lock = threading.Lock()  # held to insert, and to look for the oldest
        self._ended: deque[Pending[R]] = deque()
        self._is_woken = False

    def __len__(self) -> int:
        return len(self._open)

    def add(self, call: Pending[R]) -> None:
        with self._lock:
            self._open[call] = None
        call.started_call.call_when_done(partial(self._ended.append, call))

    def wait(self, seconds: float | None = None) -> Pending[R] | None:
        """Remove and return the next call that has ended; None if there is none, or after `wake`.

        Blocks: for `seconds` at most, by default until the deadline of the oldest call.
        Raises: DeadlineError when the oldest call is overdue, as `Pending.wait`.
        """
        while True:
            if self._ended:
                call = self._ended.popleft()
                del self._open[call]
                return call
            with self._lock:
                oldest = next(iter(self._open), None)
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
        for call in list(self._open)[:1]:
            call.started_call.wake()

    def _has_news(self) -> bool:
        return bool(self._ended) or self._is_woken


def as_completed(calls: Iterable[Pending[Any]]) -> Iterator[Pending[Any]]:
    """Yield started calls as they end. Every call has the run's deadline, from its own start.

    Blocks and raises: as `CompletionQueue.wait`.
    """
    queue: CompletionQueue[Any] = CompletionQueue()
    for call in calls:
        queue.add(call)
    while (ended := queue.wait()) is not None:
        yield ended
