"""The calls in flight: who still owes an answer, what came back, and what ends all waiting."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, field

from spmd_rl.controller.codec import Packed
from spmd_rl.controller.wire import Failure
from spmd_rl.errors import SpmdError


@dataclass(eq=False)
class CallRecord:
    """One issued command: `what` names it for people ("trainer.train_step"), `answers` are by rank."""

    number: int
    what: str
    ranks: tuple[int, ...]
    phase: str
    started: float = field(default_factory=time.monotonic)
    answers: dict[int, Packed | Failure] = field(default_factory=dict)
    waiting: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = set(self.ranks)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started

    @property
    def owing(self) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank in self.ranks if rank not in self.answers]

    @property
    def failure(self) -> tuple[int, Failure] | None:
        """The first failure and its rank."""
        return next(((rank, answer) for rank, answer in self.answers.items() if isinstance(answer, Failure)), None)


class Calls:
    """All records in flight. The socket thread answers, the recipe's thread waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[int, CallRecord] = {}
        self._numbers = itertools.count(1)
        self.cause: SpmdError | None = None
        self.phase = ""
        self.waited_s = 0.0

    def open(self, what: str, ranks: tuple[int, ...]) -> CallRecord:
        """A new record. Raises: what has ended the run, if something has."""
        with self._changed:
            if self.cause is not None:
                raise self.cause
            record = CallRecord(next(self._numbers), what, ranks, self.phase)
            self._open[record.number] = record
            return record

    def answer(self, number: int, rank: int, answer: Packed | Failure) -> bool:
        """File an answer; False when nobody asked this rank for it."""
        with self._changed:
            record = self._open.get(number)
            if record is None or rank not in record.waiting:
                return False
            record.waiting.remove(rank)
            record.answers[rank] = answer
            if not record.waiting or isinstance(answer, Failure):
                self._changed.notify_all()
            return True

    def fail(self, cause: SpmdError) -> None:
        """End every wait, now and later, with `cause`; the first cause stands."""
        with self._changed:
            self.cause = self.cause or cause
            self._changed.notify_all()

    def wait(self, record: CallRecord, deadline_s: float) -> bool:
        """Whether `record` was answered by every rank or failed on one.

        Blocks: for `deadline_s` at most; the socket thread's `answer` or `fail` ends it.
        Raises: the cause given to `fail`.
        """
        began = time.monotonic()
        with self._changed:
            done = self._changed.wait_for(
                lambda: self.cause is not None or record.failure is not None or not record.waiting, deadline_s
            )
            self.waited_s += time.monotonic() - began
            if record.failure is None and record.owing and self.cause is not None:
                raise self.cause
            return done

    def close(self, record: CallRecord) -> None:
        """Nobody waits for `record` any more."""
        with self._changed:
            self._open.pop(record.number, None)

    def cause_within(self, seconds: float) -> SpmdError | None:
        """What ended the run, if something does within `seconds`. Blocks: that long at most."""
        with self._changed:
            self._changed.wait_for(lambda: self.cause is not None, seconds)
            return self.cause

    def oldest(self, rank: int) -> CallRecord | None:
        """The call that `rank` has owed an answer the longest, which is the one it is in."""
        with self._changed:
            return next((record for record in self._open.values() if rank in record.waiting), None)

    def num_owed(self, rank: int) -> int:
        """How many answers `rank` owes."""
        with self._changed:
            return sum(rank in record.waiting for record in self._open.values())
