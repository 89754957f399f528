"""What the ranks forked and left running: the launcher adopts it, and ends it when the run is over.

A process whose parent ends goes to its nearest ancestor that is a subreaper, instead of to the
system's first process.
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

from spmd_rl.controller.lifecycle.process_tree import parent_of

LEAVE_S = 5.0  # for an orphan to end by itself
LOOK_S = 0.1
PR_SET_CHILD_SUBREAPER = 36


class Orphans:
    """Those of this process's descendants that lose their parent from now on."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._ours = _children()

    def end(self) -> None:
        """Wait for the orphans to end, then name those that did not on stderr, and kill them.

        A process with a session of its own, such as the controller or a server, is left alone.
        Blocks: for `LEAVE_S` at most.
        """
        until = time.monotonic() + LEAVE_S
        while (left := self._left()) and time.monotonic() < until:
            threading.Event().wait(LOOK_S)
        if left:
            shown = ", ".join(f"pid {pid} ({_name(pid)})" for pid in left)
            print(
                f"what the ranks forked still ran after the run, and was ended: {shown}",
                file=sys.stderr,
            )
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _left(self) -> list[int]:
        return sorted(pid for pid in _children() - self._ours if _runs_in_our_group(pid))


def _children() -> set[int]:
    everyone = (int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal())
    return {pid for pid in everyone if parent_of(pid) == os.getpid()}


def _runs_in_our_group(pid: int) -> bool:
    """Whether a child is of our process group and has not ended; one that has is reaped."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == 0 and os.getpgid(pid) == os.getpgrp()
    except (ChildProcessError, ProcessLookupError):  # somebody else has waited for it
        return False


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return "gone"
