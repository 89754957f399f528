"""Leader/followers: several threads share one socket, and one of them at a time leads.

The leader waits for messages and handles them. A thread that waits for an answer becomes the leader
if nobody is, so that the answer wakes this thread and no other. Other threads that wait are its
followers: it wakes one whose answer it has handled, and all of them when it stops leading. A
background thread leads while nobody waits: it takes the lead after `IDLE_S` without a leader, and
yields to whoever asks for it.
Source: Schmidt et al., Pattern-Oriented Software Architecture 2, "Leader/Followers".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from spmd_rl.controller.channel.wakeup_fd import WakeupFd

TICK_S = 0.25  # the longest that a leader waits for one message
IDLE_S = 0.25  # without a leader, after which the background thread leads


class _Follower(NamedTuple):
    """A thread that waits while another leads: until `done()`, or until it may lead itself."""

    done: Callable[[], object]
    wakeup: threading.Event


class LeaderFollowers:
    """Decides which thread leads.

    The leader calls `handle(seconds)`, which waits that long at most for something to arrive, and
    handles it. Waking `wakeup` ends that wait. Only one thread at a time is inside `handle`, so
    that whatever `handle` owns needs no other lock.
    """

    def __init__(self, handle: Callable[[float], object], wakeup: WakeupFd, name: str) -> None:
        self._handle = handle
        self.wakeup = wakeup
        self._lead = threading.Lock()  # held by the leader
        self._led_recently = False  # by any thread, since the background thread last looked
        self._lead_requested = False
        self._followers: list[_Follower] = []
        # Tells a leader that does not call `handle` that it should: when something was queued, and
        # a few times a second.
        self.handle_due = False
        self._closing = threading.Event()
        self._background = threading.Thread(target=self._run_background, name=name, daemon=True)

    def start(self) -> None:
        """Start the background thread, which leads at once."""
        self._background.start()

    def handle_until(self, done: Callable[[], object], seconds: float) -> bool:
        """Lead until `done()`; False when that was not within `seconds`. Any thread may call it.

        Blocks: for `seconds` at most.
        """
        end = time.monotonic() + seconds
        while not done():
            if (left := end - time.monotonic()) <= 0:
                return False
            if self._lead_or_follow(done, min(left, TICK_S)):
                try:
                    while not done() and (left := end - time.monotonic()) > 0:
                        self._handle(min(left, TICK_S))
                        self.wake_followers()
                finally:
                    self.resign()
        return True

    def lead(self, seconds: float) -> bool:
        """Become the leader until `resign`; False when another thread still led after `seconds`.

        A thread that leads this way may wait for messages by other means than `handle`.
        Blocks: for `seconds` at most.
        """
        if self._lead.acquire(False):
            return True
        self._lead_requested = True
        self.wakeup.wake()
        return self._lead.acquire(timeout=seconds)

    def resign(self) -> None:
        """Stop being the leader."""
        self._led_recently = True
        self._lead.release()
        if self._followers:
            for follower in self._followers.copy():
                follower.wakeup.set()

    def wake_followers(self) -> None:
        """Wake the followers that need not wait any longer. The leader calls it as it handles."""
        if self._followers:
            for follower in self._followers.copy():
                if follower.done():
                    follower.wakeup.set()

    def wake_leader(self) -> None:
        """Have the leader handle what is due, though nothing may have arrived."""
        self.handle_due = True
        self.wakeup.wake()

    def run_or_wake(self, flush: Callable[[], None]) -> None:
        """Run `flush` now if nobody leads, else wake the leader.

        `handle` runs it too, before and after it waits.
        """
        if not self._lead.acquire(False):
            self.wake_leader()
            return
        try:
            flush()
        finally:
            self.resign()

    def close(self) -> None:
        """End the background thread. Blocks: until it has handled what it is handling."""
        self._closing.set()
        self.wakeup.wake()
        self._background.join()

    def _lead_or_follow(self, done: Callable[[], object], seconds: float) -> bool:
        """Become the leader, or wait until `done()`; False when the lead was not to be had.

        Blocks: for `seconds` at most.
        """
        if self._lead.acquire(False):
            return True
        follower = _Follower(done, threading.Event())
        self._followers.append(follower)
        try:
            if done():  # nobody told this thread of what happened before it was a follower
                return False
            if self._lead.acquire(False):
                return True
            self._lead_requested = True
            self.wakeup.wake()
            follower.wakeup.wait(seconds)
            return not done() and self._lead.acquire(False)
        finally:
            self._followers.remove(follower)

    def _run_background(self) -> None:
        while not self._closing.is_set():
            self.handle_due = True
            if self._led_recently:
                self._led_recently = False
            else:
                self._lead_requested = False
                if self._lead.acquire(blocking=False):
                    self._lead_in_background()
            self._closing.wait(IDLE_S)

    def _lead_in_background(self) -> None:
        try:
            while not (self._lead_requested or self._closing.is_set()):
                self._handle(TICK_S)
                self.wake_followers()
        finally:
            self.resign()
