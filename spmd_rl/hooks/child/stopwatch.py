"""Time of one async call, without what others in its event loop took and what it waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

LONG_STEP_S = 0.01  # a step that holds the event loop for longer stops the time of all others


class LoopClock:
    """Time of an event loop: it stands still while a step holds the loop for long."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._held_s = clock, 0.0

    def now_s(self) -> float:
        return self._clock() - self._held_s

    def add_step(self, step_s: float, watch: Stopwatch) -> None:
        """Count a step of the call whose time is `watch`."""
        if step_s > LONG_STEP_S:
            self._held_s += step_s
            watch.add(step_s)


class Stopwatch:
    """Time that one call has used. It may be paused several times at once."""

    def __init__(self, clock: LoopClock) -> None:
        self._clock, self._used_s, self._num_pauses = clock, 0.0, 0
        self._running_since_s = clock.now_s()

    @property
    def used_s(self) -> float:
        if self._num_pauses:
            return self._used_s
        return self._used_s + self._clock.now_s() - self._running_since_s

    def add(self, seconds: float) -> None:
        """Count seconds that the clock of the loop leaves out."""
        self._used_s += seconds

    def pause(self) -> None:
        self._used_s = self.used_s
        self._num_pauses += 1

    def resume(self) -> None:
        self._num_pauses -= 1
        self._running_since_s = self._clock.now_s()
