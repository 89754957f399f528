"""One run at a time in a folder: the controller holds a lock there, which the system takes back when it ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import threading
import time
from pathlib import Path

from spmd_rl.errors import ConfigError

CLAIM_FILE = "controller.lock"
WAIT_S = 15.0  # for a controller that is ending, before a restart of its ranks
LOOK_S = 0.1
UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # a file system without locks cannot tell


def claim(folder: Path, wait_s: float = WAIT_S) -> int:
    """Lock `folder` until the descriptor that comes back is closed, or the process ends.

    Blocks: for `wait_s` at most. Raises: ConfigError naming who holds it.
    """
    file = os.open(folder / CLAIM_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    until = time.monotonic() + wait_s
    while not _locked(file):
        if time.monotonic() > until:
            holder = os.pread(file, 1000, 0).decode(errors="replace").strip() or "which has just begun"
            os.close(file)
            raise ConfigError(f"another run is going on in {folder} ({holder}): end it, or choose another name")
        threading.Event().wait(LOOK_S)
    os.ftruncate(file, 0)
    with contextlib.suppress(OSError):  # a full disk is the run's affair
        os.pwrite(file, f"host {socket.gethostname()}, pid {os.getpid()}\n".encode(), 0)
    return file


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    return True
