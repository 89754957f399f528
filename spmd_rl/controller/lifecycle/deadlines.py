"""How long a run goes on that somebody ends from outside, and a recipe that makes no call. Time is
an argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from signal import Signals

from spmd_rl.errors import DeadlineError, LostRankError, SpmdError


class Notice:
    """That somebody ends the run from outside: `error` is what it ends with, once somebody does.

    After a SIGTERM it goes on for `grace_s`, so that something can be saved; `unsaved` is the
    clause that says what is lost if that takes longer.
    """

    def __init__(self) -> None:
        self.error: SpmdError | None = None
        self.grace_s = 0.0
        self.unsaved = ""
        self._since = 0.0

    def take(self, name: str, who: str, now: float) -> None:
        """Somebody ends the run by the signal of this name; the first counts."""
        if self.error is None:
            self._since = now if name == "SIGTERM" else -math.inf
            self.error = _ended(f"the run was ended from outside: {who}", 128 + Signals[name])

    def and_then(self, clause: str) -> SpmdError:
        """The error, saying more."""
        assert self.error is not None
        return _ended(f"{self.error}{clause}", self.error.exit_code)

    def overdue(self, now: float) -> SpmdError | None:
        """The error to end with now, if the run has to."""
        if self.error is None or now - self._since < self.grace_s:
            return None
        return self.and_then(self.unsaved) if self._since > -math.inf else self.error


class RecipeClock:
    """How long the recipe's own code has been computing since its last call; it may for `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since = math.inf
        self._waited_s = 0.0

    @contextmanager
    def running(self, now: float) -> Iterator[None]:
        """What runs inside is the recipe."""
        self._since = now
        try:
            yield
        finally:
            self._since = math.inf

    def overdue(self, owed: bool, waited_s: float, now: float) -> DeadlineError | None:
        """The error to end with, if no answer is `owed` to the recipe, nor has it waited for one
        for too long.

        `waited_s` is how long it has waited in all.
        """
        if self._since == math.inf:
            return None
        if owed or waited_s != self._waited_s:
            self._since, self._waited_s = now, waited_s
        elif now - self._since > self._limit_s:
            return DeadlineError(f"the recipe has made no call for {self._limit_s:g} s")
        return None


def _ended(sentence: str, exit_code: int) -> SpmdError:
    error = LostRankError(sentence)
    error.exit_code = exit_code
    return error
