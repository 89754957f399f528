"""File descriptor that wakes a polling thread, from other threads and from signal handlers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket


class WakeupFd:
    """A descriptor to poll: it becomes readable after `wake`, and after each caught signal."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)
        self._caught: tuple[signal.Signals, ...] = ()
        self._mask: set[int | signal.Signals] = set()

    def fileno(self) -> int:
        return self._far.fileno()

    def wake(self) -> None:
        # a socket full of earlier wakes serves as well
        with contextlib.suppress(BlockingIOError):
            self._near.send(b"\0")

    def catch_signals(self, *numbers: signal.Signals) -> None:
        """Have these signals arrive here, even while the main thread is inside C code.

        Call it on the main thread only.
        """
        self._caught = numbers
        signal.set_wakeup_fd(self._near.fileno(), warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, lambda *_: None)
        os.register_at_fork(
            before=self._block_signals,
            after_in_parent=self._unblock_signals,
            after_in_child=self._reset_in_child,
        )

    def close(self) -> list[signal.Signals]:
        """Restore the default handlers and close; return the signals that nobody has drained.

        Call it on the thread that called `catch_signals`.
        """
        caught = self._caught
        self._restore_defaults()
        undrained = self._drain(caught)
        self._near.close()
        self._far.close()
        return undrained

    def _restore_defaults(self) -> None:
        if self._caught:
            signal.set_wakeup_fd(-1)
        for number in self._caught:
            signal.signal(number, signal.SIG_DFL)
        self._caught = ()

    def _block_signals(self) -> None:
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._caught)

    def _unblock_signals(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _reset_in_child(self) -> None:
        """Let signals end a process forked from this one.

        It shares the socket, where its own signals would otherwise pass for this process's.
        """
        self._restore_defaults()
        self._unblock_signals()

    def drain(self) -> list[signal.Signals]:
        """Remove all wakes, and return the signals among them, in order."""
        return self._drain(self._caught)

    def _drain(self, caught: tuple[signal.Signals, ...]) -> list[signal.Signals]:
        try:
            return [signal.Signals(byte) for byte in self._far.recv(4096) if byte in caught]
        except BlockingIOError:
            return []
