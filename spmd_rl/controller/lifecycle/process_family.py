"""Family of a process of hooks: all that its hooks have started, in whatever session it runs.

The process is a subreaper: what loses its parent there becomes its child, and so stays below it. It
has a mark in its environment too, which tells what is left of its family once it has ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

MARK_ENV = "SPMD_RL_HOOKS"  # what hooks start inherits it
END_S, POLL_S = 2.0, 0.002  # for killed processes to end


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
    parents = dict(_running())
    found, new = {root}, {root}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    marked = f"{mark}\0".encode()
    found |= {pid for pid in parents if pid not in found and _has_mark(pid, marked)}
    return found - {root, os.getpid()}


def _running() -> Iterator[tuple[int, int]]:
    """Yield each process that has not ended, with its parent."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):  # it has just ended
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    yield int(folder.name), int(parent)


def _has_mark(pid: int, marked: bytes) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended, or is another user's
        return False
    return (b"\0" + environment).find(b"\0" + marked) >= 0
