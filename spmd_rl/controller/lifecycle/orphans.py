"""Orphans: processes that ranks forked and left running, which the launcher ends after the run.

The launcher becomes a subreaper: a process whose parent ends becomes a child of its nearest
ancestor that is one.
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

from spmd_rl.controller.lifecycle.process_family import is_of_hooks
from spmd_rl.controller.lifecycle.process_tree import parent_of

EXIT_S = 5.0  # for an orphan to end by itself
POLL_S = 0.1
PR_SET_CHILD_SUBREAPER = 36


class Orphans:
    """The descendants of this process that lose their parent from now on."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._own_children = _children()

    def end(self) -> None:
        """Wait for the orphans to end, then name those that did not on stderr, and kill them.

        A process with a session of its own, such as the controller or a server, is left alone,
        unless hooks have started it.
        Blocks: for `EXIT_S` at most.
        """
        until = time.monotonic() + EXIT_S
        while (running := self._running()) and time.monotonic() < until:
            threading.Event().wait(POLL_S)
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
    pids = (int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal())
    return {pid for pid in pids if parent_of(pid) == os.getpid()}


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
