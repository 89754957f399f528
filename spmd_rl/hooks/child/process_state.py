"""State of a process that hooks share: what a call has changed of it is put back."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # its `getsignal` looks for no enum, which is slow
import contextlib
import gc
import os
import random
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from spmd_rl.hooks.wire.messages import DAMAGED_EXIT

_LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
# those whose handlers Python may set; it returns None for those of C programs
_SIGNALS = sorted(set(map(int, signal.valid_signals())) - {signal.SIGKILL, signal.SIGSTOP})
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
MAX_THREADS = 256  # that hooks may have left running


class SeedWatch:
    """Notices that `random` or `numpy.random` is seeded. Make it before hooks are imported.

    A later call would otherwise draw what an earlier one has fixed. Seeds that hooks set while they
    are imported stand until the first call that sets one.
    """

    def __init__(self) -> None:
        self.was_seeded = False
        # without an argument, they seed from the system
        self._seed: list[Callable[..., Any]] = [random.seed, np.random.seed]
        for module in (random, np.random):
            for name in ("seed", "setstate", "set_state"):
                if hasattr(module, name):
                    setattr(module, name, self._watched(getattr(module, name)))

    def seed_anew(self) -> None:
        """Give later calls other random numbers."""
        for seed in self._seed:
            seed()
        self.was_seeded = False

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.was_seeded = True
            return function(*args, **kwargs)

        return watched


class ProcessState:
    """The state of this process once the hooks are imported, before any call."""

    def __init__(self, seeds: SeedWatch) -> None:
        self.is_worn = False  # another process is to take the next call
        self._pid, self._folder = os.getpid(), os.open(".", os.O_RDONLY)
        # an alarm that a hook has left behind is nobody's
        signal.signal(signal.SIGALRM, lambda number, frame: None)
        for stream in (sys.stdout, sys.stderr):
            stream.close = lambda: None  # type: ignore[method-assign]
        seeds.was_seeded = False
        parts = [*_parts(seeds), (lambda: _identity(os.stat(".")), self._return_to_folder)]
        self._parts = [(read, put_back, _copy(read())) for read, put_back in parts]
        self._lasting = _output_files(), _limits()  # what cannot always be put back

    def restore(self) -> bool:
        """Put back what calls have changed for later ones, and return whether they did.

        The process ends here if calls have closed its descriptors, or if a hook has forked it and
        has returned.
        """
        self.end_if_forked()
        try:
            os.fstat(self._folder)
        except OSError:
            os._exit(DAMAGED_EXIT)
        has_changed = False
        for read, put_back, before in self._parts:
            if read() != before:
                put_back(before)
                has_changed = True
        # a hard limit that was lowered stays so
        has_lasted = (_output_files(), _limits()) == self._lasting
        self.is_worn |= not has_lasted or self._holds_too_much()
        return has_changed or self.is_worn

    def end_if_forked(self) -> None:
        """End a process that a hook has forked, and that has returned from it."""
        if os.getpid() != self._pid:
            os._exit(0)

    def _return_to_folder(self, before: Any) -> None:
        os.fchdir(self._folder)

    def _holds_too_much(self) -> bool:
        """Return whether calls have left many files open, or many threads running."""
        most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            lowest_free = os.dup(self._folder)
        except OSError:
            return True
        os.close(lowest_free)
        return lowest_free > most_files // 2 > 0 or threading.active_count() > MAX_THREADS


def _parts(seeds: SeedWatch) -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Yield a function that reads a part of the state, and one that puts an earlier value back."""
    yield _umask, os.umask
    yield lambda: [sys.stdout, sys.stderr], _set_streams
    yield _limits, _set_limits
    yield lambda: [_signal.getsignal(number) for number in _SIGNALS], _set_handlers
    yield lambda: [signal.getitimer(timer)[0] for timer in _TIMERS], _stop_timers
    set_mask = partial(_signal.pthread_sigmask, signal.SIG_SETMASK)
    yield lambda: _signal.pthread_sigmask(signal.SIG_BLOCK, ()), set_mask
    yield lambda: vars(os.environ)["_data"], _set_environment  # not a copy, which takes long
    yield lambda: sys.path, lambda path: sys.path.__setitem__(slice(None), path)
    yield sys.getrecursionlimit, sys.setrecursionlimit
    yield sys.gettrace, sys.settrace
    yield sys.getprofile, sys.setprofile
    yield gc.isenabled, lambda enabled: (gc.disable, gc.enable)[enabled]()
    yield lambda: seeds.was_seeded, lambda _: seeds.seed_anew()
    yield _torch_switches, _set_torch


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, (dict, list)) else value


def _identity(file: os.stat_result) -> tuple[int, int]:
    return file.st_dev, file.st_ino


def _output_files() -> list[tuple[int, int]]:
    """Return which files the output goes to; none where it was closed."""
    try:
        return [_identity(os.fstat(number)) for number in (1, 2)]
    except OSError:
        return []


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def _limits() -> list[tuple[int, int]]:
    return [resource.getrlimit(limit) for limit in _LIMITS]


def _set_limits(limits: list[tuple[int, int]]) -> None:
    for limit, before in zip(_LIMITS, limits, strict=True):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, before)


def _set_streams(streams: list[Any]) -> None:
    sys.stdout, sys.stderr = streams


def _set_handlers(handlers: list[Any]) -> None:
    for number, before in zip(_SIGNALS, handlers, strict=True):
        if before is not None and _signal.getsignal(number) is not before:
            signal.signal(number, before)


def _stop_timers(_: Any) -> None:
    for timer in _TIMERS:
        signal.setitimer(timer, 0)


def _set_environment(environment: dict[bytes, bytes]) -> None:
    os.environ.clear()
    os.environ.update({os.fsdecode(name): os.fsdecode(environment[name]) for name in environment})


def _torch_switches() -> tuple[bool, str]:
    """Return torch's grad mode and default dtype, also before it is imported."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_dtype"):  # it is just imported
        return True, "float32"
    return torch.is_grad_enabled(), str(torch.get_default_dtype()).removeprefix("torch.")


def _set_torch(switches: tuple[bool, str]) -> None:
    torch = sys.modules["torch"]
    torch.set_grad_enabled(switches[0])
    torch.set_default_dtype(getattr(torch, switches[1]))
