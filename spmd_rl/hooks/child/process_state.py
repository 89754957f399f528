"""State of a process that hooks share: what a hook has changed is put back after its call."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # its `getsignal` looks for no enum, which is slow
import contextlib
import gc
import io
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TextIO

from spmd_rl.hooks.child.seed_watch import SeedWatch

_LIMITS = sorted(
    {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
)
# those whose handlers Python may set; it returns None for those of C programs
_SIGNALS = sorted(set(map(int, signal.valid_signals())) - {signal.SIGKILL, signal.SIGSTOP})
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
MAX_THREADS = 256  # that hooks may have left running


class ProcessState:
    """The state of this process as it is now, before any call."""

    def __init__(self, seeds: SeedWatch | None = None) -> None:
        self._pid = os.getpid()
        self._folder = os.open(".", os.O_RDONLY)
        self._stdout, self._stderr = sys.stdout, sys.stderr
        signal.signal(signal.SIGALRM, _ignore)
        self._files, self._limits, self._limits_hold = _files(), _limits(), True
        self._umask = os.umask(0)
        os.umask(self._umask)
        self._environment = dict(_environment())
        self._handlers, self._mask = _handlers(), _signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._path = sys.path.copy()
        self._interpreter = _interpreter()
        self._torch = _torch_state()
        self._seeds = seeds
        if seeds:
            seeds.start()

    def end_if_forked(self) -> None:
        """End a process that a hook has forked, and that has returned from it."""
        if os.getpid() != self._pid:
            os._exit(0)

    def restore(self) -> None:
        """Put back what a call can have changed for later ones: the folder, the streams, limits,
        the environment, signals, timers, the search path, random numbers and switches.

        Raises: OSError when the call has closed descriptors of the process.
        """
        self.end_if_forked()
        os.fchdir(self._folder)
        os.umask(self._umask)
        self._restore_streams()
        self._restore_limits()
        self._restore_signals()
        if _environment() != self._environment:
            self._restore_environment()
        if sys.path != self._path:
            sys.path[:] = self._path
        if _interpreter() != self._interpreter:
            for switch, value in zip(_SWITCHES, self._interpreter, strict=True):
                switch(value)
        if self._seeds:
            self._seeds.restore()
        if "torch" in sys.modules:
            self._restore_torch()

    @property
    def damaged(self) -> bool:
        """Return whether what may harm other calls has changed: output files, or limits."""
        try:
            return _files() != self._files or _limits() != self._limits
        except OSError:
            return True

    @property
    def is_worn(self) -> bool:
        """Return whether another process is to take the next call, because what a call has left
        behind cannot be put back: a limit, other output files, or too many files and threads.
        """
        try:
            lowest_free = os.dup(self._folder)
            os.close(lowest_free)
            has_other_files = _files() != self._files
        except OSError:
            return True
        most_files, _ = self._limits[_LIMITS.index(resource.RLIMIT_NOFILE)]
        has_many = lowest_free > most_files // 2 > 0 or threading.active_count() > MAX_THREADS
        return has_many or has_other_files or not self._limits_hold

    def _restore_streams(self) -> None:
        if self._stdout.closed:
            self._stdout = _stream(1)
        if self._stderr.closed:
            self._stderr = _stream(2)
        sys.stdout, sys.stderr = self._stdout, self._stderr

    def _restore_limits(self) -> None:
        self._limits_hold = _limits() == self._limits
        if not self._limits_hold:
            for limit, before in zip(_LIMITS, self._limits, strict=True):
                # a hard limit that was lowered stays so: the process is then worn
                with contextlib.suppress(ValueError, OSError):
                    resource.setrlimit(limit, before)
            self._limits_hold = _limits() == self._limits

    def _restore_signals(self) -> None:
        for timer in _TIMERS:
            signal.setitimer(timer, 0)
        if _handlers() != self._handlers:
            for number, before in zip(_SIGNALS, self._handlers, strict=True):
                if before is not None and _signal.getsignal(number) is not before:
                    signal.signal(number, before)
        _signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _restore_environment(self) -> None:
        for name in _environment().keys() - self._environment.keys():
            del os.environ[os.fsdecode(name)]
        for name, value in self._environment.items():
            os.environ[os.fsdecode(name)] = os.fsdecode(value)

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


def _handlers() -> list[Any]:
    return [_signal.getsignal(number) for number in _SIGNALS]


def _environment() -> dict[bytes, bytes]:
    """Return the variables themselves, which are compared after each call, without a copy."""
    variables: dict[bytes, bytes] = vars(os.environ)["_data"]
    return variables


def _set_collector(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()


_SWITCHES: tuple[Callable[[Any], object], ...] = (
    sys.setrecursionlimit,
    sys.settrace,
    sys.setprofile,
    _set_collector,
)


def _interpreter() -> tuple[Any, ...]:
    """Return the values that `_SWITCHES` set."""
    return sys.getrecursionlimit(), sys.gettrace(), sys.getprofile(), gc.isenabled()


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
