"""Workers of this host as processes: which of them have ended, and the end of one that does not
answer.

A launcher alone would wait half a minute for that one. A stopped process takes no signal but
SIGKILL. Only children of a given launcher are ever touched.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from spmd_rl.controller.channel.wire import Hello

END_S = 1.0  # for processes that said their last word to end
LOOK_S = 0.5  # for a launcher to see that they have: torchrun looks ten times a second


class ChildWatcher:
    """Which children of `launcher` have ended, as the system says: whatever one forked keeps its
    connections open.
    """

    def __init__(self, launcher: int | None) -> None:
        self._launcher = launcher
        self._ranks: dict[int, int] = {}
        self._ended: list[int] = []
        self._poll = select.poll()

    def watch(self, hello: Hello) -> None:
        """Watch a worker from now on, if it is a child of the launcher, on this host."""
        if hello.host == socket.gethostname() and parent_of(hello.pid) == self._launcher:
            # it has just ended, or there is no descriptor left: others will notice
            with contextlib.suppress(OSError):
                descriptor = os.pidfd_open(hello.pid)
                self._ranks[descriptor] = hello.rank
                self._poll.register(descriptor, select.POLLIN)

    def ended(self) -> list[int]:
        """The ranks that had ended by the last time that this was asked: their last words have come
        since.
        """
        known, self._ended = self._ended, []
        for descriptor, _ in self._poll.poll(0):
            self._poll.unregister(descriptor)
            os.close(descriptor)
            self._ended.append(self._ranks.pop(descriptor))
        return known

    def close(self) -> None:
        """Watch nobody any more."""
        for descriptor in self._ranks:
            os.close(descriptor)
        self._ranks.clear()


def end_children(launcher: int, lost: Iterable[Hello]) -> None:
    """SIGKILL those of `lost` that are children of `launcher`, on this host."""
    for hello in lost:
        if hello.host == socket.gethostname() and parent_of(hello.pid) == launcher:
            with contextlib.suppress(ProcessLookupError):
                os.kill(hello.pid, signal.SIGKILL)


def await_end(leaving: Iterable[Hello]) -> None:
    """Blocks: until those of `leaving` that are on this host have ended and a launcher has noticed;
    `END_S` ends it.
    """
    until = time.monotonic() + END_S
    for hello in leaving:
        if hello.host == socket.gethostname():
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(hello.pid)
                waiting = select.poll()  # select itself takes no descriptor above 1023
                waiting.register(descriptor, select.POLLIN)
                waiting.poll(max(0.0, until - time.monotonic()) * 1000)
                os.close(descriptor)
    threading.Event().wait(LOOK_S)


def parent_of(pid: int) -> int | None:
    """The parent of a process of this host; None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])
