"""PrivateFolder: a folder of a run, on one host, that no other user can enter.

Every process that enters it holds a lock on it until the process ends. A folder without a lock was
therefore left by killed processes, and may be removed.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from spmd_rl.errors import ConfigError

PREFIX = "spmd_rl-run-"
MEMORY_FOLDER = Path("/dev/shm")
ERROR_FILE_ENV = "TORCHELASTIC_ERROR_FILE"

_exit_callbacks: list[Callable[[], None]] = []  # to run before this process ends


class PrivateFolder:
    """A folder in the user's runtime folder if this host has one, else in the temporary folder.

    Processes that give the same `name` enter the same folder; without a name, it is a new one.
    With `in_memory`, its files are memory that processes share.
    Raises: ConfigError when another user made the folder, or when the file system has no locks.
    """

    def __init__(self, name: str = "", *, in_memory: bool = False) -> None:
        parent = MEMORY_FOLDER if in_memory else _parent_folder()
        self.path = parent / f"{PREFIX}{name or secrets.token_hex(4)}"
        try:
            while (descriptor := _enter(self.path)) is None:
                pass
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be used as the run's private folder ({error.strerror}): "
                "remove it, or set TMPDIR to a folder on a local disk"
            ) from error
        self._descriptor = descriptor

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exception: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Leave the folder, and remove it unless another process still uses it."""
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)
        sweep()  # if several leave at once, none may get the lock above, but the last does here


def meeting_folder() -> PrivateFolder:
    """Return the folder in which the ranks of one host find each other, a new one for every start.

    Its name follows from torchrun's log folder of this start. The last rank to end removes it.
    Raises: ConfigError when torchrun has no log folder.
    """
    start = Path(os.environ.get(ERROR_FILE_ENV, "")).parent.parent
    if not start.name.startswith("attempt_"):
        raise ConfigError(
            f"{ERROR_FILE_ENV} names no log folder of torchrun: "
            "start torchrun with another --log-dir"
        )
    return _meeting_folder(str(start))


@functools.cache
def _meeting_folder(start: str) -> PrivateFolder:
    folder, process = PrivateFolder(hashlib.sha256(start.encode()).hexdigest()[:16]), os.getpid()

    def leave() -> None:
        if os.getpid() == process:  # not in a forked process
            folder.leave()

    _exit_callbacks.append(leave)
    atexit.register(leave_meeting_folder)  # the store in it is used until the end
    return folder


def leave_meeting_folder() -> None:
    """Leave the folder in which the ranks met, if this process has entered it.

    Call it before the process ends without running its exit handlers.
    """
    while _exit_callbacks:
        _exit_callbacks.pop()()


def sweep() -> None:
    """Remove the private folders of this user that no living process has entered."""
    parents = {_parent_folder(), MEMORY_FOLDER}
    for path in [path for parent in parents for path in parent.glob(f"{PREFIX}*")]:
        # it is another user's, or in use, or has just been removed
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if (status := os.fstat(descriptor)).st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # Another sweep may have removed it, and its process may have made it anew.
                    if os.path.samestat(status, path.lstat()):
                        shutil.rmtree(path)
            finally:
                os.close(descriptor)


def _parent_folder() -> Path:
    # In a batch job, XDG_RUNTIME_DIR may name a folder of another host, which is not writable here.
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(runtime if os.access(runtime, os.W_OK | os.X_OK) else tempfile.gettempdir())


def _enter(path: Path) -> int | None:
    """Return the descriptor that holds the lock; None if the folder was removed before that."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(0o700)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
            raise PermissionError(0, "it is not this user's alone")
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if path.exists() and os.path.samestat(status, path.lstat()):
            return descriptor
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
