"""Event loop of a process's sockets: polls all sources, and calls the handler of each ready one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from signal import Signals
from typing import Protocol

import zmq

from spmd_rl.controller.channel.leader_followers import LeaderFollowers
from spmd_rl.controller.channel.wakeup_fd import WakeupFd

TICK_S = 0.25  # between two calls of `on_tick`


class LoopListener(Protocol):
    """The owner's listener, as far as the loop calls it.

    Its methods run on the thread that leads, one at a time. They must not block, except to end the
    process.
    """

    def on_tick(self, now: float) -> None:
        """Do what is due a few times a second."""

    def on_signal(self, number: Signals) -> None:
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
