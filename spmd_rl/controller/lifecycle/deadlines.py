"""Deadlines: the grace after a signal, and the longest time without a call. Time is an argument."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from signal import Signals

from spmd_rl.errors import DeadlineError, LostRankError, SpmdError

# How long a failed collective may be ahead of the news of the death that caused it. A death on
# another host is noticed at the next ping, and told once the last messages have been read.
DEATH_NEWS_S = 2.0


class TerminationNotice:
    """Notes that a signal ends the run from outside; `error` is then what the run ends with.

    After the first signal the run goes on for `grace_s`, so that it can save a checkpoint.
    `lost_work` is the clause that says what is lost if it does not finish in that time. A second
    signal ends it at once.
    """

    def __init__(self) -> None:
        self.error: SpmdError | None = None
        self.name = ""  # of the first signal
        self.grace_s = 0.0
        self.lost_work = ""
        self._since = 0.0

    def note_signal(self, name: str, recipients: str, now: float) -> bool:
        """Note the signal `name`, and the sentence that says who got it; False if it is not the
        first.
        """
        if self.error is not None:
            return False
        self.name, self._since = name, now
        sentence = f"the run was ended from outside: {recipients}"
        self.error = _termination(sentence, 128 + Signals[name])
        return True

    def end_grace(self) -> None:
        """End the run at once: it got a second signal."""
        self._since = -math.inf

    def error_with(self, clause: str) -> SpmdError:
        """Return the error with a clause added to its sentence."""
        assert self.error is not None
        return _termination(f"{self.error}{clause}", self.error.exit_code)

    def overdue(self, now: float) -> SpmdError | None:
        """Return the error to end with now; None while the run may go on."""
        if self.error is None or now - self._since < self.grace_s:
            return None
        return self.error_with(self.lost_work) if self._since > -math.inf else self.error


class RecipeDeadline:
    """Limits how long the recipe's own code may compute between two calls, to `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since = math.inf
        self._waited_s = 0.0

    @contextmanager
    def running(self, now: float) -> Iterator[None]:
        """Apply the limit to the code inside, which is the recipe's."""
        self._since = now
        try:
            yield
        finally:
            self._since = math.inf

    def overdue(self, unanswered: bool, waited_s: float, now: float) -> DeadlineError | None:
        """Return the error to end with, if the recipe has computed for too long.

        It has not while a call is `unanswered`. `waited_s` is how long it has waited for calls in
        all: if that grew, it has made one since.
        """
        if self._since == math.inf:
            return None
        if unanswered or waited_s != self._waited_s:
            self._since, self._waited_s = now, waited_s
        elif now - self._since > self._limit_s:
            return DeadlineError(f"the recipe has made no call for {self._limit_s:g} s")
        return None


def _termination(sentence: str, exit_code: int) -> SpmdError:
    error = LostRankError(sentence)
    error.exit_code = exit_code
    return error
