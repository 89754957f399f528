"""One run at a time in a folder: the controller holds a lock there, which the system takes back
when it ends.

Before that, and as long as it lives, `spmd-rl run` holds another: a second start need not wait for
the controller.
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
WAIT_S = 15.0  # for a controller that is ending, before a restart of its ranks
LOOK_S = 0.1
# a file system without locks cannot tell
UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}

_HOLDER = re.compile(r"host (?P<host>.*), pid (?P<pid>\d+)\nstarted by pid (?P<parent>\d+)\n")


def acquire_run_lock(folder: Path, wait_s: float = WAIT_S, name: str = CONTROLLER_LOCK) -> int:
    """Lock the file `name` of `folder` until the descriptor that comes back is closed, or the
    process ends.

    Blocks: for `wait_s` at most, and not for a run of this host that nobody has ended.
    Raises: ConfigError naming who holds it.
    """
    file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    until = time.monotonic() + wait_s
    while not _locked(file):
        holder = os.pread(file, 1000, 0).decode(errors="replace")
        if _goes_on(holder) or time.monotonic() > until:
            os.close(file)
            raise _refusal(folder, holder)
        threading.Event().wait(LOOK_S)
    os.ftruncate(file, 0)
    with contextlib.suppress(OSError):  # a full disk is the run's affair
        me = f"host {socket.gethostname()}, pid {os.getpid()}\nstarted by pid {os.getppid()}\n"
        os.pwrite(file, me.encode(), 0)
    return file


@contextlib.contextmanager
def launcher_lock(folder: Path) -> Iterator[None]:
    """Hold a launcher's lock of `folder`; what is forked meanwhile lets go of it, and may outlive
    the launcher.

    Raises: ConfigError naming the launcher that holds it.
    """
    held = [acquire_run_lock(folder, 0.0, LAUNCHER_LOCK)]

    def let_go() -> None:
        while held:
            os.close(held.pop())

    os.register_at_fork(after_in_child=let_go)
    try:
        yield
    finally:
        let_go()


def refuse_running_run(folder: Path) -> None:
    """Raises: ConfigError when a run of this host is going on in `folder`; of others the controller
    will know.
    """
    try:
        file = os.open(folder / CONTROLLER_LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # there is none, or the folder is not ours: the controller says so
        return
    try:
        holder = os.pread(file, 1000, 0).decode(errors="replace")
        if _goes_on(holder) and not _locked(file):
            raise _refusal(folder, holder)
    finally:
        os.close(file)


def _refusal(folder: Path, holder: str) -> ConfigError:
    who = holder.partition("\n")[0] or "which has just begun"
    return ConfigError(
        f"another run is going on in {folder} ({who}): end it, or choose another name"
    )


def _goes_on(holder: str) -> bool:
    """Whether the holder is seen to be no controller that is ending: the rank 0 that started it is
    there still.
    """
    found = _HOLDER.fullmatch(holder)
    if found is None or found["host"] != socket.gethostname():
        return False
    try:
        stat = Path(f"/proc/{found['pid']}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[1] == found["parent"]


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    return True
