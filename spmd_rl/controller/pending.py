"""Pending: a call that was started, whose value can be waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

R = TypeVar("R")


class Pending(Generic[R]):
    """The value of a call that may not have finished yet."""

    def __init__(self, finish: Callable[[float | None], R]) -> None:
        self._finish = finish
        self._value: list[R] = []

    def wait(self, deadline_s: float | None = None) -> R:
        """Return the call's value, the same object each time.

        Blocks: until every rank has answered; `deadline_s` ends it, or else the run's deadline.
        Raises: DeadlineError, LostRankError, ContractError, or what the endpoint raised.
        """
        if not self._value:
            self._value.append(self._finish(deadline_s))
        return self._value[0]
