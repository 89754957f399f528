"""Locks that keep two runs from writing into one folder.

The controller holds one lock; the system releases it when the process ends. `spmd-rl run` holds
another from its start to its end, so that a second start is refused before it has a controller.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from spmd_rl.errors import ConfigError

CONTROLLER_LOCK = "controller.lock"
LAUNCHER_LOCK = "launcher.lock"
ACQUIRE_S = 15.0  # to wait for the controller of the same run, before its ranks restart
POLL_S = 0.1
# file systems without locks: the run goes on unlocked
UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}

_HOLDER = re.compile(r"host (?P<host>.*), pid (?P<pid>\d+)\nstarted by pid (?P<parent>\d+)\n")


def acquire_run_lock(folder: Path, wait_s: float = ACQUIRE_S, name: str = CONTROLLER_LOCK) -> int:
    """Lock the file `name` of `folder`, and return its descriptor.

    The lock lasts until the descriptor is closed or the process ends.

    Blocks: for `wait_s` at most, and not at all if a run of this host holds it that nobody has
    ended. Raises: ConfigError naming the process that holds it.
    """
    file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    deadline = time.monotonic() + wait_s
    while not _try_lock(file):
        holder = _read_holder(file)
        if _is_running(holder) or time.monotonic() > deadline:
            os.close(file)
            raise _refusal(folder, holder)
        threading.Event().wait(POLL_S)
    _write_holder(file)
    return file


@contextlib.contextmanager
def launcher_lock(folder: Path) -> Iterator[None]:
    """Hold the launcher's lock of `folder`.

    Forked children release their copy of it, because they may outlive the launcher.
    Raises: ConfigError naming the launcher that holds it.
    """
    descriptors = [acquire_run_lock(folder, 0.0, LAUNCHER_LOCK)]

    def release() -> None:
        while descriptors:
            os.close(descriptors.pop())

    os.register_at_fork(after_in_child=release)
    try:
        yield
    finally:
        release()


def refuse_running_run(folder: Path) -> None:
    """Raises: ConfigError when a run of this host is going on in `folder`.

    Runs of other hosts are found later, by the controller.
    """
    try:
        file = os.open(folder / CONTROLLER_LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # no lock file, or not ours: the controller checks again
        return
    try:
        holder = _read_holder(file)
        if _is_running(holder) and not _try_lock(file):
            raise _refusal(folder, holder)
    finally:
        os.close(file)


def _write_holder(file: int) -> None:
    """Write into a lock file that this process holds it."""
    os.ftruncate(file, 0)
    with contextlib.suppress(OSError):  # a full disk: the run itself reports it
        own = f"host {socket.gethostname()}, pid {os.getpid()}\nstarted by pid {os.getppid()}\n"
        os.pwrite(file, own.encode(), 0)


def _read_holder(file: int) -> str:
    """Return what `_write_holder` last wrote into a lock file, or ""."""
    return os.pread(file, 1000, 0).decode(errors="replace")


def _refusal(folder: Path, holder: str) -> ConfigError:
    who = holder.partition("\n")[0] or "which has just started"
    return ConfigError(
        f"another run is going on in {folder} ({who}): end it, or choose another --run.name"
    )


def _is_running(holder: str) -> bool:
    """Whether the holder is a controller of this host whose rank 0 still lives.

    A controller whose rank 0 is gone is about to end.
    """
    found = _HOLDER.fullmatch(holder)
    if found is None or found["host"] != socket.gethostname():
        return False
    try:
        stat = Path(f"/proc/{found['pid']}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[1] == found["parent"]


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    return True
