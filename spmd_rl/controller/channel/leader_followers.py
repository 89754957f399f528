"""Threads that share one socket: whoever waits for its messages handles them, and a thread of its
own when nobody does.

A message then wakes the thread that waits for it and no other (the leader/followers pattern). The
stand-in takes the turn once nobody has had it for `ABSENCE_S`, and gives it back to whoever asks.
Source: Schmidt et al., Pattern-Oriented Software Architecture 2, "Leader/Followers".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from spmd_rl.controller.channel.wakeup_fd import WakeupFd

TICK_S = 0.25  # the longest that one turn waits for a message
ABSENCE_S = 0.25


class LeaderFollowers:
    """`handle(seconds)` waits that long at most for something to arrive, and handles it; `waker`
    ends its wait.

    It runs on many threads, on one at a time: whatever it owns needs no other lock.
    """

    def __init__(self, handle: Callable[[float], None], waker: WakeupFd, name: str) -> None:
        self._handle = handle
        self._waker = waker
        self._lock = threading.Lock()
        self._taken = False  # by anybody, since the stand-in looked last
        self._wanted = False
        # for those who wait in another way: time for `handle`, when asked and a few times a second
        self.due = False
        self._closing = threading.Event()
        self._stand_in = threading.Thread(target=self._stand_ins, name=name, daemon=True)

    def start(self) -> None:
        """Let the stand-in begin, at once."""
        self._stand_in.start()

    def until(self, done: Callable[[], object], seconds: float) -> bool:
        """Handle what arrives until `done()`; False when it was not within `seconds`. Any thread
        may wait.

        Blocks: for `seconds` at most.
        """
        end = time.monotonic() + seconds
        while not done():
            if (left := end - time.monotonic()) <= 0:
                return False
            if self.take(min(left, TICK_S)):
                try:
                    while not done() and (left := end - time.monotonic()) > 0:
                        self._handle(min(left, TICK_S))
                finally:
                    self.leave()
        return True

    def take(self, seconds: float) -> bool:
        """Have the turn until `leave`, to wait in another way than `handle`; whoever wants it waits
        for that.

        Blocks: for `seconds` at most, and then it is somebody else's: False.
        """
        if self._lock.acquire(False):
            return True
        self._wanted = True
        self._waker.wake()
        return self._lock.acquire(timeout=seconds)

    def leave(self) -> None:
        """The turn is over."""
        self._taken = True
        self._lock.release()

    def now_or_next(self, act: Callable[[], None]) -> None:
        """Run `act` now if nobody has the turn, else wake who has: `handle` does it before and
        after it waits.
        """
        if not self._lock.acquire(False):
            self.due = True
            self._waker.wake()
            return
        try:
            act()
        finally:
            self.leave()

    def close(self) -> None:
        """End the stand-in. Blocks: until what it is handling is handled."""
        self._closing.set()
        self._waker.wake()
        self._stand_in.join()

    def _stand_ins(self) -> None:
        while not self._closing.is_set():
            self.due = True
            if self._taken:
                self._taken = False
            else:
                self._wanted = False
                if self._lock.acquire(blocking=False):
                    self._stand_in_once()
            self._closing.wait(ABSENCE_S)

    def _stand_in_once(self) -> None:
        try:
            while not (self._wanted or self._closing.is_set()):
                self._handle(TICK_S)
        finally:
            self.leave()
