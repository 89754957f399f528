"""A call that was started: wait for it when its value is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

R = TypeVar("R")


class Pending(Generic[R]):
    """The value of a call to come."""

    def __init__(self, finish: Callable[[float | None], R]) -> None:
        self._finish = finish
        self._value: list[R] = []

    def wait(self, deadline_s: float | None = None) -> R:
        """The call's value, the same one each time.

        Blocks: until every rank has answered; the run's `deadline_s` ends it, or this one.
        Raises: DeadlineError, LostRankError, ContractError, or what the endpoint raised.
        """
        if not self._value:
            self._value.append(self._finish(deadline_s))
        return self._value[0]
