"""Ring of answers: rewards of one number each, in memory that a process shares with its rank.

The process adds an answer as soon as a call has returned, and tells the rank of several at once. If
it dies before that, the rank finds them here, so that no call is made again.
"""

from __future__ import annotations

from typing import NamedTuple

CAPACITY = 1024  # answers; more than the calls that a process may have at once
_IDS, _SECONDS, _REWARDS = (1 + part * CAPACITY for part in range(3))  # after the count
SIZE_BYTES = 8 * (1 + 3 * CAPACITY)


class Rewards(NamedTuple):
    """Calls that returned a number, the seconds that each took, and the number."""

    call_ids: list[int]
    seconds: list[float]
    rewards: list[float]


class AnswerRing:
    """One end of the ring, in `memory` of `SIZE_BYTES`. The process adds, the rank takes."""

    def __init__(self, memory: memoryview) -> None:
        self._integers, self._floats = memory.cast("q"), memory.cast("d")
        self.count = 0  # of the answers that this end has added or taken

    def add(self, call_id: int, seconds: float, reward: float) -> None:
        """Add an answer; `count` is then that of all that were added."""
        at = self.count % CAPACITY
        self._integers[_IDS + at] = call_id
        self._floats[_SECONDS + at] = seconds
        self._floats[_REWARDS + at] = reward
        self.count += 1
        self._integers[0] = self.count  # last of all: the rank may read now

    @property
    def num_added(self) -> int:
        """How many answers the process has added."""
        return self._believed(self._integers[0])

    def take(self, until: int | None = None) -> Rewards:
        """Return the answers that were not taken yet, up to number `until`, by default all."""
        first = self.count
        self.count = self.num_added if until is None else self._believed(until)
        places = [number % CAPACITY for number in range(first, self.count)]
        return Rewards(
            [self._integers[_IDS + at] for at in places],
            [self._floats[_SECONDS + at] for at in places],
            [self._floats[_REWARDS + at] for at in places],
        )

    def _believed(self, count: int) -> int:
        """Return a count that the process has told, if the ring can hold so many answers more; a
        hook may have written nonsense.
        """
        return count if self.count <= count <= self.count + CAPACITY else self.count
