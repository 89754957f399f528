"""Families of processes: what hooks have started, in whatever session it runs, and what the ranks
left running, which the launcher ends after the run.

A process of hooks is a subreaper: what loses its parent there becomes its child, and so stays below
it. It has a mark in its environment too, which tells what is left of its family once it has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

from spmd_rl.controller.lifecycle.process_tree import processes

MARK_ENV = "SPMD_RL_HOOKS"  # what hooks start inherits it
END_S, POLL_S = 2.0, 0.002  # for killed processes to end
ORPHAN_EXIT_S, ORPHAN_POLL_S = 5.0, 0.1  # for an orphan to end by itself
PR_SET_CHILD_SUBREAPER = 36


def end_family(root: int, mark: str, variable: str = MARK_ENV) -> None:
    """SIGKILL what the process `root` has started, and what carries its mark, but not `root`.

    The mark is the value of a variable of the environment.

    `root` is stopped, so that it starts nothing more, and may have ended.
    Blocks: until the system has ended them, `END_S` at most.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(root, signal.SIGSTOP)
    until = time.monotonic() + END_S
    while (family := _family(root, f"{variable}={mark}")) and time.monotonic() < until:
        for pid in family:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        threading.Event().wait(POLL_S)


def is_of_hooks(pid: int) -> bool:
    """Return whether a process was started by hooks, of any process of theirs."""
    return _has_mark(pid, MARK_ENV.encode() + b"=")


def _family(root: int, mark: str) -> set[int]:
    """Return the descendants of `root`, and all that has the variable, as far as they run."""
    parents = {pid: parent for pid, state, parent in processes() if state not in "ZX"}
    found, new = {root}, {root}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    marked = f"{mark}\0".encode()
    found |= {pid for pid in parents if pid not in found and _has_mark(pid, marked)}
    return found - {root, os.getpid()}


def _has_mark(pid: int, marked: bytes) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended, or is another user's
        return False
    return (b"\0" + environment).find(b"\0" + marked) >= 0


class Orphans:
    """The descendants of this process that lose their parent from now on.

    This process becomes a subreaper: what loses its parent becomes a child of the nearest one.
    """

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._own_children = _children()

    def end(self) -> None:
        """Wait for the orphans to end, then name those that did not on stderr, and kill them.

        A process with a session of its own, such as the controller or a server, is left alone,
        unless hooks have started it.
        Blocks: for `ORPHAN_EXIT_S` at most.
        """
        until = time.monotonic() + ORPHAN_EXIT_S
        while (running := self._running()) and time.monotonic() < until:
            threading.Event().wait(ORPHAN_POLL_S)
        if running:
            names = ", ".join(f"pid {pid} ({_name(pid)})" for pid in running)
            print(
                f"processes that the ranks forked still ran after the run and were killed: {names}",
                file=sys.stderr,
            )
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _running(self) -> list[int]:
        return sorted(pid for pid in _children() - self._own_children if _is_ours_and_runs(pid))


def _children() -> set[int]:
    return {pid for pid, _, parent in processes() if parent == os.getpid()}


def _is_ours_and_runs(pid: int) -> bool:
    """Return whether a child of our process group, or of hooks, still runs; reap it if it does
    not.
    """
    try:
        runs = os.waitpid(pid, os.WNOHANG)[0] == 0
        return runs and (os.getpgid(pid) == os.getpgrp() or is_of_hooks(pid))
    except (ChildProcessError, ProcessLookupError):  # another thread has waited for it
        return False


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return "gone"
