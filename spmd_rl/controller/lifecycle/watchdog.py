"""What a worker knows about those above it, its controller and its launcher, and when it gives them
up. Pure.
"""

from __future__ import annotations

import signal

CONNECT_S = 30.0  # until the first word of the controller
CLOSED_S = 1.5  # for rank 0 to say why the controller is gone, once its connection closed
SIGNALLED_S = 5.0  # the longest silence of the controller, once the launcher is ending this process


class Watchdog:
    """`launcher` is the process that started this worker; times are of one monotonic clock."""

    def __init__(self, endpoint: str, launcher: int, now: float) -> None:
        self.signal: signal.Signals | None = None
        self._launcher = launcher
        self._until, self._why = now + CONNECT_S, f"heard nothing from the controller at {endpoint}"

    def pinged(self, lost_after_s: float, now: float) -> None:
        """The controller lives."""
        patience_s = lost_after_s if self.signal is None else min(SIGNALLED_S, lost_after_s)
        self._until, self._why = (
            now + patience_s,
            f"lost the controller: silent for {patience_s:g} s",
        )

    def disconnected(self, now: float) -> None:
        """Its connection closed."""
        if now + CLOSED_S < self._until:
            self._until, self._why = now + CLOSED_S, "lost the controller: its connection closed"

    def signalled(self, number: signal.Signals, now: float) -> bool:
        """The launcher is ending this worker; False when that was known."""
        if self.signal is not None:
            return False
        self.signal = number
        if now + SIGNALLED_S < self._until:
            self._until, self._why = now + SIGNALLED_S, f"was ended by {number.name}"
        return True

    def launcher_lost(self, parent: int) -> str | None:
        """Why this worker cannot stay, if its parent is no longer its launcher."""
        return None if parent == self._launcher else f"lost its launcher (pid {self._launcher})"

    def given_up(self, now: float) -> str | None:
        """Why this worker waits no longer, once it does not."""
        return self._why if now > self._until else None
