"""Processes of the workers on this host: notice that one has ended, or kill one that hangs.

A launcher alone would wait half a minute for a worker that hangs. A stopped process reacts to no
signal but SIGKILL. Only children of a given launcher are ever touched.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spmd_rl.controller.channel.messages import Hello

EXIT_S = 1.0  # for processes that sent their last message to end
NOTICE_S = 0.5  # for a launcher to notice that they have: torchrun polls ten times a second


class ChildWatcher:
    """Watches the children of `launcher`, and tells which have ended.

    Their connections do not tell: a process that a worker forked keeps them open.
    """

    def __init__(self, launcher: int | None) -> None:
        self._launcher = launcher
        self._ranks: dict[int, int] = {}  # by the descriptor of the process
        self._just_ended: list[int] = []
        self._poll = select.poll()

    def watch(self, hello: Hello) -> None:
        """Watch a worker from now on, if it is a child of the launcher on this host."""
        if _is_child(hello, self._launcher):
            # It has just ended, or there is no descriptor left. It is noticed in other ways.
            with contextlib.suppress(OSError):
                descriptor = os.pidfd_open(hello.pid)
                self._ranks[descriptor] = hello.rank
                self._poll.register(descriptor, select.POLLIN)

    def ended(self) -> list[int]:
        """Return the ranks that had ended by the previous call.

        Their last messages have arrived since.
        """
        ended, self._just_ended = self._just_ended, []
        for descriptor, _ in self._poll.poll(0):
            self._poll.unregister(descriptor)
            os.close(descriptor)
            self._just_ended.append(self._ranks.pop(descriptor))
        return ended

    def close(self) -> None:
        """Stop watching."""
        for descriptor in self._ranks:
            os.close(descriptor)
        self._ranks.clear()


def kill_children(launcher: int, workers: Iterable[Hello]) -> None:
    """SIGKILL those of `workers` that are children of `launcher` on this host."""
    for hello in workers:
        if _is_child(hello, launcher):
            with contextlib.suppress(ProcessLookupError):
                os.kill(hello.pid, signal.SIGKILL)


def wait_for_exits(workers: Iterable[Hello]) -> None:
    """Wait until those of `workers` that are on this host have ended, and a launcher noticed it.

    Blocks: for `EXIT_S` and `NOTICE_S` at most.
    """
    until = time.monotonic() + EXIT_S
    for hello in workers:
        if hello.host == socket.gethostname():
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(hello.pid)
                poll = select.poll()  # select.select takes no descriptor above 1023
                poll.register(descriptor, select.POLLIN)
                poll.poll(max(0.0, until - time.monotonic()) * 1000)
                os.close(descriptor)
    threading.Event().wait(NOTICE_S)


def _is_child(hello: Hello, launcher: int | None) -> bool:
    return hello.host == socket.gethostname() and parent_of(hello.pid) == launcher


def processes() -> Iterator[tuple[int, str, int]]:
    """Yield pid, state and parent of each process of this host."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and (stat := _stat(folder.name)) is not None:
            yield int(folder.name), *stat


def parent_of(pid: int) -> int | None:
    """Return the parent of a process of this host; None when there is no such process."""
    stat = _stat(str(pid))
    return None if stat is None else stat[1]


def _stat(pid: str) -> tuple[str, int] | None:
    """Return state and parent of a process; None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, parent = stat.rpartition(")")[2].split()[:2]
    return state, int(parent)


def is_ending(pid: int) -> bool:
    """Return whether a process of this host has ended, or a SIGKILL is about to end it.

    Its threads end one by one. Until the last one has, its children still have it as their parent,
    though the end of the thread that started them is told to them already.
    """
    try:
        return says_ending(Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return Path("/proc/self/status").exists()  # else this system does not tell


def says_ending(status: str) -> bool:
    """Return whether a process is ending, by its `status` of procfs."""
    fields = dict(line.partition(":")[::2] for line in status.splitlines())
    has_ended = fields["State"].split()[0] in "ZX"
    return has_ended or bool(int(fields["SigPnd"], 16) & 1 << (signal.SIGKILL - 1))
