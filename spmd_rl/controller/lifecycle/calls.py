"""The calls in flight: who still owes an answer, what came back, and what ends all waiting."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from spmd_rl.controller.channel.codec import Packed
from spmd_rl.controller.channel.router import MOMENT_S
from spmd_rl.controller.channel.wire import Failure
from spmd_rl.errors import SpmdError

Until = Callable[[Callable[[], bool], float], bool]  # Turns.until


class CallRecord:
    """One issued command: `what` names it for people ("trainer.train_step"), `answers` are by rank."""

    def __init__(self, number: int, what: str, ranks: tuple[int, ...], phase: str) -> None:
        self.number = number
        self.what = what
        self.ranks = ranks
        self.phase = phase
        self.started = time.monotonic()
        self.answers: dict[int, Packed] = {}
        self.failure: tuple[int, Failure] | None = None  # the first, and its rank
        self.waiting = set(ranks)
        self.over = not ranks  # nothing is waited for any more

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started

    @property
    def owing(self) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank in self.ranks if rank in self.waiting]


class Calls:
    """All records in flight. Whoever has the turn of the socket answers; `until` is how to wait for
    that.

    `meanwhile` is called once in each wait that turns out to be long: it has a few milliseconds.
    """

    def __init__(self, until: Until) -> None:
        self._until = until
        # any thread changes it, in one operation, and reads a copy
        self._open: dict[int, CallRecord] = {}
        self._numbers = itertools.count(1)
        self.cause: SpmdError | None = None
        self.phase = ""
        self.waited_s = 0.0
        self.meanwhile: Callable[[], None] = lambda: None

    def open(self, what: str, ranks: tuple[int, ...]) -> CallRecord:
        """A new record. Raises: what has ended the run, if something has."""
        record = CallRecord(next(self._numbers), what, ranks, self.phase)
        self._open[record.number] = record
        if self.cause is not None:
            self.close(record)
            raise self.cause
        return record

    def answer(self, number: int, rank: int, answer: Packed) -> bool:
        """File an answer, in a turn of the socket; False when nobody asked this rank for it."""
        record = self._open.get(number)
        if record is None or rank not in (waiting := record.waiting):
            return False
        record.answers[rank] = answer
        waiting.remove(rank)
        if not waiting:
            record.over = True  # at last: another thread may be waiting for just that
        return True

    def failed(self, number: int, rank: int, failure: Failure) -> bool:
        """File a failure as an answer; the first ends the wait."""
        record = self._open.get(number)
        if record is None or rank not in record.waiting:
            return False
        record.failure = record.failure or (rank, failure)
        record.waiting.remove(rank)
        record.over = True
        return True

    def fail(self, cause: SpmdError) -> None:
        """End every wait, now and later, with `cause`; the first cause stands."""
        self.cause = self.cause or cause
        for record in list(self._open.values()):
            record.over = True

    def wait(self, record: CallRecord, deadline_s: float) -> bool:
        """Whether `record` was answered by every rank or failed on one.

        Blocks: for `deadline_s` at most; `answer` or `fail` ends it.
        Raises: the cause given to `fail`, and what `meanwhile` raises.
        """
        began = time.monotonic()
        done = self._until(lambda: record.over, min(MOMENT_S, deadline_s))
        if not done:
            self.meanwhile()
            done = self._until(lambda: record.over, max(0.0, began + deadline_s - time.monotonic()))
        self.waited_s += time.monotonic() - began
        if record.failure is None and record.waiting and self.cause is not None:
            raise self.cause
        return done

    def close(self, record: CallRecord) -> None:
        """Nobody waits for `record` any more."""
        self._open.pop(record.number, None)

    def cause_within(self, seconds: float) -> SpmdError | None:
        """What ended the run, if something does within `seconds`. Blocks: that long at most."""
        self._until(lambda: self.cause is not None, seconds)
        return self.cause

    def oldest(self, rank: int) -> CallRecord | None:
        """The call that `rank` has owed an answer the longest, which is the one it is in."""
        return next(
            (record for record in list(self._open.values()) if rank in record.waiting), None
        )

    def num_owed(self, rank: int) -> int:
        """How many answers `rank` owes."""
        return sum(rank in record.waiting for record in list(self._open.values()))
