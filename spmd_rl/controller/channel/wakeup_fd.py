"""Wakes a polling thread from other threads and from signal handlers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket


class WakeupFd:
    """A descriptor to poll: readable after `wake`, or after a signal once `take_signals` was
    called.
    """

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)
        self._taken: tuple[signal.Signals, ...] = ()
        self._mask: set[int | signal.Signals] = set()

    def fileno(self) -> int:
        return self._far.fileno()

    def wake(self) -> None:
        # full of wakes not yet taken: as good as one more
        with contextlib.suppress(BlockingIOError):
            self._near.send(b"\0")

    def take_signals(self, *numbers: signal.Signals) -> None:
        """Have these signals arrive here, even while the main thread is inside C code.

        Call it on the main thread only.
        """
        self._taken = numbers
        signal.set_wakeup_fd(self._near.fileno(), warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, lambda *_: None)
        os.register_at_fork(
            before=self._hold, after_in_parent=self._release, after_in_child=self._in_child
        )

    def close(self) -> list[signal.Signals]:
        """Give the signals back, on the thread that took them, and close; returns those that came
        and nobody saw.
        """
        taken = self._taken
        self._give_back()
        late = self._drain(taken)
        self._near.close()
        self._far.close()
        return late

    def _give_back(self) -> None:
        if self._taken:
            signal.set_wakeup_fd(-1)
        for number in self._taken:
            signal.signal(number, signal.SIG_DFL)
        self._taken = ()

    def _hold(self) -> None:
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._taken)

    def _release(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _in_child(self) -> None:
        """A process forked from this one is ended by its signals, which are no news here: it shares
        the socket.
        """
        self._give_back()
        self._release()

    def drain(self) -> list[signal.Signals]:
        """Take all wakes; the signals among them, in order."""
        return self._drain(self._taken)

    def _drain(self, taken: tuple[signal.Signals, ...]) -> list[signal.Signals]:
        try:
            return [signal.Signals(byte) for byte in self._far.recv(4096) if byte in taken]
        except BlockingIOError:
            return []
