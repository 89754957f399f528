"""Deferred: the answer of an endpoint that comes later, while its rank serves other calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

R = TypeVar("R")


class Deferred(Generic[R]):
    """What an endpoint returns instead of its value when the value is not there yet.

    The role calls `resolve` or `fail` once, on the main thread, such as from its `pump`. `on_abort`
    is called when the controller asks to end the call early; the role then resolves it soon.
    """

    def __init__(self, on_abort: Callable[[], None] = lambda: None) -> None:
        self.abort = on_abort
        self.is_answered = False
        self._on_answer: Callable[[], None] = lambda: None
        self.value: R | None = None
        self.error: BaseException | None = None

    @classmethod
    def of(cls, value: R) -> Deferred[R]:
        """Return one that is answered already."""
        answered = cls()
        answered.resolve(value)
        return answered

    def resolve(self, value: R) -> None:
        """Answer the call with this value. Raises: RuntimeError if it was answered before."""
        self.value = value
        self._end()

    def fail(self, error: BaseException) -> None:
        """Answer the call with an error. Raises: RuntimeError if it was answered before."""
        self.error = error
        self._end()

    def call_when_answered(self, callback: Callable[[], None]) -> None:
        """Call `callback` once there is an answer, at once if there is one."""
        self._on_answer = callback
        if self.is_answered:
            callback()

    def _end(self) -> None:
        if self.is_answered:
            raise RuntimeError("a deferred call can be answered only once")
        self.is_answered = True
        self._on_answer()
