"""State of a process that hooks share: what a hook has changed is put back after its call."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # its `getsignal` looks for no enum, which is slow
import io
import os
import resource
import signal
import sys
from types import FrameType
from typing import Any, TextIO

_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)
_SIGALRM = int(signal.SIGALRM)


class ProcessState:
    """The state of this process as it is now, before any call."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._folder = os.open(".", os.O_RDONLY)
        self._stdout, self._stderr = sys.stdout, sys.stderr
        self._files, self._limits = _files(), _limits()
        self._torch = _torch_state()
        signal.signal(signal.SIGALRM, _ignore)

    def end_if_forked(self) -> None:
        """End a process that a hook has forked, and that has returned from it."""
        if os.getpid() != self._pid:
            os._exit(0)

    def restore(self) -> None:
        """Put the folder, the streams, the alarm and torch's switches back.

        Raises: OSError when the call has closed descriptors of the process.
        """
        self.end_if_forked()
        os.fchdir(self._folder)
        self._restore_streams()
        if _signal.getsignal(_SIGALRM) is not _ignore:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, _ignore)
        if "torch" in sys.modules:
            self._restore_torch()

    @property
    def damaged(self) -> bool:
        """Return whether what cannot be put back has changed: output files, or limits."""
        try:
            return _files() != self._files or _limits() != self._limits
        except OSError:
            return True

    def _restore_streams(self) -> None:
        if self._stdout.closed:
            self._stdout = _stream(1)
        if self._stderr.closed:
            self._stderr = _stream(2)
        sys.stdout, sys.stderr = self._stdout, self._stderr

    def _restore_torch(self) -> None:
        """Put torch's switches back; those of a call that has just imported it are kept."""
        state = _torch_state()
        if self._torch and self._torch != state:
            torch = sys.modules["torch"]
            torch.set_grad_enabled(self._torch[0])
            torch.set_default_dtype(self._torch[1])
        self._torch = self._torch or state


def _files() -> list[tuple[int, int]]:
    found = [os.fstat(number) for number in (1, 2)]
    return [(file.st_dev, file.st_ino) for file in found]


def _limits() -> list[tuple[int, int]]:
    return [resource.getrlimit(limit) for limit in _LIMITS]


def _stream(descriptor: int) -> TextIO:
    file = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(file, errors="backslashreplace", write_through=True)


def _ignore(number: int, frame: FrameType | None) -> None:
    """An alarm that a hook has left behind is nobody's."""


def _torch_state() -> tuple[bool, Any] | None:
    """Return torch's grad mode and default dtype, which a reward model may change; None without
    torch.
    """
    torch = sys.modules.get("torch")
    return (torch.is_grad_enabled(), torch.get_default_dtype()) if torch else None
