"""Pending: a call that was started, whose value can be waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

R = TypeVar("R")


class StartedCall:
    """What a `Pending` asks of the call that it stands for. This one has ended already."""

    @property
    def is_done(self) -> bool:
        return True

    @property
    def seconds_left(self) -> float:
        """The time to the call's deadline."""
        return 0.0

    def abort(self) -> None:
        """Ask the call's ranks to end it early."""

    def call_when_done(self, listener: Callable[[], object]) -> None:
        """Call `listener` once the call has ended, perhaps twice, on any thread."""
        listener()

    def wake(self) -> None:
        """Have whoever is in `handle_until` look again."""

    def handle_until(self, done: Callable[[], object], seconds: float) -> bool:
        """Handle what arrives from workers until `done()`, for `seconds` at most."""
        return bool(done())


ENDED_CALL = StartedCall()


class Pending(Generic[R]):
    """The value of a call that may not have finished yet."""

    def __init__(self, finish: Callable[[float | None], R], call: StartedCall = ENDED_CALL) -> None:
        self.started_call = call
        self._finish = finish
        self._value: list[R] = []

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once, or raise."""
        return self.started_call.is_done

    def wait(self, deadline_s: float | None = None) -> R:
        """Return the call's value, the same object each time.

        Blocks: until every rank has answered; `deadline_s` ends it, or else the run's deadline.
        Raises: DeadlineError, LostRankError, ContractError, or what the endpoint raised.
        """
        if not self._value:
            self._value.append(self._finish(deadline_s))
        return self._value[0]

    def abort(self) -> None:
        """Ask for an early end, and return at once: `wait` then gives what there is so far.

        A call whose endpoint cannot end early goes on.
        """
        self.started_call.abort()
