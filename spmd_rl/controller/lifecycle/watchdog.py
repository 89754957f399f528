"""Watchdog of a worker: when it gives up its controller or its launcher. Time is an argument."""

from __future__ import annotations

import signal

CONNECT_S = 30.0  # until the first message of the controller
# for rank 0 to say why the controller is gone, once the connection to it has closed
DISCONNECTED_S = 5.0
SIGNALLED_S = 5.0  # the longest silence of the controller, once the launcher sent a signal


class Watchdog:
    """Decides whether this worker still has a controller and a launcher.

    `launcher` is the pid of the process that started this worker. All times are of one monotonic
    clock.
    """

    def __init__(self, endpoint: str, launcher: int, now: float) -> None:
        self.signal: signal.Signals | None = None
        self._launcher = launcher
        self._deadline = now + CONNECT_S
        self._reason = f"heard nothing from the controller at {endpoint}"

    def pinged(self, lost_after_s: float, now: float) -> None:
        """Note that the controller is alive, and may be silent for `lost_after_s`."""
        silence_s = lost_after_s if self.signal is None else min(SIGNALLED_S, lost_after_s)
        self._deadline = now + silence_s
        self._reason = f"lost the controller: silent for {silence_s:g} s"

    def disconnected(self, now: float) -> None:
        """Note that the connection to the controller has closed."""
        self._shorten(now + DISCONNECTED_S, "lost the controller: its connection closed")

    def signalled(self, number: signal.Signals, now: float) -> bool:
        """Note a signal of the launcher; False when it repeats the first."""
        if self.signal == number:
            return False
        self.signal = self.signal or number
        self._shorten(now + SIGNALLED_S, f"was ended by {number.name}")
        return True

    def launcher_lost(self, parent: int) -> str | None:
        """Return why this worker has to end, if its parent is no longer its launcher."""
        return None if parent == self._launcher else f"lost its launcher (pid {self._launcher})"

    def controller_lost(self, now: float) -> str | None:
        """Return why this worker gives up its controller, once it does."""
        return self._reason if now > self._deadline else None

    def _shorten(self, deadline: float, reason: str) -> None:
        if deadline < self._deadline:
            self._deadline, self._reason = deadline, reason
