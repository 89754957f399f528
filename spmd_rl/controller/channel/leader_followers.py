"""Leader/followers: several threads share one socket, and one of them at a time leads.

The leader waits for messages and handles them. A thread that waits for an answer becomes the leader
if nobody is, so that the answer wakes this thread and no other. Other threads that wait are its
followers: it wakes one whose answer it has handled, and all of them when it stops leading. A
background thread leads while nobody waits: it takes the lead after `IDLE_S` without a leader, and
yields to whoever asks for it. To lead is to poll all sources of an `EventLoop`.
Source: Schmidt et al., Pattern-Oriented Software Architecture 2, "Leader/Followers".
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import zmq

TICK_S = 0.25  # between two calls of `on_tick`, and the longest that a leader waits for one message
IDLE_S = 0.25  # without a leader, after which the background thread leads


class WakeupFd:
    """A descriptor to poll: it becomes readable after `wake`, and after each caught signal."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)
        self._caught: tuple[signal.Signals, ...] = ()
        self._mask: set[int | signal.Signals] = set()

    def fileno(self) -> int:
        return self._far.fileno()

    def wake(self) -> None:
        # a socket full of earlier wakes serves as well
        with contextlib.suppress(BlockingIOError):
            self._near.send(b"\0")

    def catch_signals(self, *numbers: signal.Signals) -> None:
        """Have these signals arrive here, even while the main thread is inside C code.

        Call it on the main thread only.
        """
        self._caught = numbers
        signal.set_wakeup_fd(self._near.fileno(), warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, lambda *_: None)
        os.register_at_fork(
            before=self._block_signals,
            after_in_parent=self._unblock_signals,
            after_in_child=self._reset_in_child,
        )

    def close(self) -> list[signal.Signals]:
        """Restore the default handlers and close; return the signals that nobody has drained.

        Call it on the thread that called `catch_signals`.
        """
        caught = self._caught
        self._restore_defaults()
        undrained = self._drain(caught)
        self._near.close()
        self._far.close()
        return undrained

    def _restore_defaults(self) -> None:
        if self._caught:
            signal.set_wakeup_fd(-1)
        for number in self._caught:
            signal.signal(number, signal.SIG_DFL)
        self._caught = ()

    def _block_signals(self) -> None:
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._caught)

    def _unblock_signals(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _reset_in_child(self) -> None:
        """Let signals end a process forked from this one.

        It shares the socket, where its own signals would otherwise pass for this process's.
        """
        self._restore_defaults()
        self._unblock_signals()

    def drain(self) -> list[signal.Signals]:
        """Remove all wakes, and return the signals among them, in order."""
        return self._drain(self._caught)

    def _drain(self, caught: tuple[signal.Signals, ...]) -> list[signal.Signals]:
        try:
            return [signal.Signals(byte) for byte in self._far.recv(4096) if byte in caught]
        except BlockingIOError:
            return []


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


class LoopListener(Protocol):
    """The owner's listener, as far as the loop calls it.

    Its methods run on the thread that leads, one at a time. They must not block, except to end the
    process.
    """

    def on_tick(self, now: float) -> None:
        """Do what is due a few times a second."""

    def on_signal(self, number: signal.Signals) -> None:
        """Act on a signal that this process got."""


class EventLoop(LeaderFollowers):
    """Polls `handlers`, which map a socket or a descriptor to its handler, and `wakeup`.

    `send` sends whatever is queued. The thread that leads calls `handle`.
    """

    def __init__(
        self,
        handlers: Mapping[object, Callable[[], object]],
        listener: LoopListener,
        send: Callable[[], None],
        name: str,
    ) -> None:
        super().__init__(self.handle, WakeupFd(), name)
        self._listener = listener
        self._send = send
        self._next_tick = 0.0
        self._handlers = {**handlers, self.wakeup.fileno(): self._on_wakeup}
        self._poller = zmq.Poller()
        for source in self._handlers:
            self._poller.register(source, zmq.POLLIN)

    def handle(self, seconds: float, watched: Sequence[int] = ()) -> None:
        """Send what is queued, then handle what arrives; tick if that is due.

        A `watched` descriptor that is readable ends the wait. Nobody reads it here.
        Blocks: until something arrives, `seconds` at most.
        """
        self._send()
        for source in watched:
            self._poller.register(source, zmq.POLLIN)
        try:
            ready = self._poller.poll(math.ceil(seconds * 1000))
        finally:
            for source in watched:
                self._poller.unregister(source)
        for source, _ in ready:
            if source in self._handlers:
                self._handlers[source]()
        if (now := time.monotonic()) >= self._next_tick:
            self._next_tick = now + TICK_S
            self._listener.on_tick(now)
        self._send()

    def remove(self, source: object) -> None:
        """Stop polling a source."""
        self._poller.unregister(source)

    def _on_wakeup(self) -> None:
        for number in self.wakeup.drain():
            self._listener.on_signal(number)
