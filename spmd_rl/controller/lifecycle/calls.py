"""Calls in flight: who has not answered yet, what came back, and what ends every wait."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

from spmd_rl.controller.channel.codec import Packed
from spmd_rl.controller.channel.messages import Failure
from spmd_rl.controller.channel.router import SHORT_WAIT_S
from spmd_rl.controller.channel.shared_arrays import SharedFile
from spmd_rl.errors import SpmdError

HandleUntil = Callable[[Callable[[], object], float], bool]  # Router.handle_until


class CallRecord:
    """One issued command. `what` is its name in messages ("trainer.train_step").

    `files` are those that its arguments lie in; they stay until all ranks have answered.
    """

    def __init__(
        self,
        number: int,
        what: str,
        ranks: tuple[int, ...],
        phase: str,
        files: Sequence[SharedFile],
    ) -> None:
        self.number = number
        self.what = what
        self.ranks = ranks
        self.phase = phase
        self.files = files
        self.started = time.monotonic()
        self.answers: dict[int, Packed] = {}  # by rank
        self.failure: tuple[int, Failure] | None = None  # the first one, with its rank
        self.waiting = set(ranks)  # the ranks that have not answered
        self.done = not ranks  # nobody has to wait any longer
        self._listeners: list[Callable[[], object]] = []

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started

    @property
    def unanswered(self) -> list[int]:
        """The ranks that have not answered, in order."""
        return [rank for rank in self.ranks if rank in self.waiting]

    def finish(self) -> None:
        """Note that nobody has to wait any longer, and tell the listeners."""
        self.done = True  # last of all, since another thread may be waiting for it
        self._tell_listeners()

    def call_when_done(self, listener: Callable[[], object]) -> None:
        """Call `listener` once, when the record is done; at once if it is.

        It runs on the thread that leads, and must not block.
        """
        self._listeners.append(listener)
        if self.done:
            self._tell_listeners()

    def _tell_listeners(self) -> None:
        while self._listeners:
            try:
                listener = self._listeners.pop()
            except IndexError:  # another thread has told the last one
                return
            listener()


class OpenCalls:
    """The records of all calls in flight.

    The thread that leads (leader_followers.py) records answers; `handle_until` waits for them.
    `on_long_wait` is called once in each wait of the recipe's thread that is not short; it may take
    a few milliseconds. The recipe's thread is the one that makes this object.
    """

    def __init__(self, handle_until: HandleUntil) -> None:
        self._handle_until = handle_until
        # Any thread may change it, in one operation. Loops read a copy.
        self._open: dict[int, CallRecord] = {}
        self._numbers = itertools.count(1)
        self.cause: SpmdError | None = None  # what has ended the run
        self.phase = ""
        self.waited_s = 0.0
        self._recipe_thread = threading.get_ident()
        self.on_long_wait: Callable[[], None] = lambda: None

    def open(
        self, what: str, ranks: tuple[int, ...], files: Sequence[SharedFile] = ()
    ) -> CallRecord:
        """Open and return a new record. Raises: what has ended the run, if anything has."""
        record = CallRecord(next(self._numbers), what, ranks, self.phase, files)
        self._open[record.number] = record
        if self.cause is not None:
            self.close(record)
            raise self.cause
        return record

    def record_answer(self, number: int, rank: int, answer: Packed) -> bool:
        """Record an answer; False when this rank owes none to call `number`."""
        record = self._open.get(number)
        if record is None or rank not in (waiting := record.waiting):
            return False
        record.answers[rank] = answer
        waiting.remove(rank)
        if not waiting:
            record.finish()
        return True

    def record_failure(self, number: int, rank: int, failure: Failure) -> bool:
        """Record a failure as the answer of a rank; the first failure ends the wait."""
        record = self._open.get(number)
        if record is None or rank not in record.waiting:
            return False
        record.failure = record.failure or (rank, failure)
        record.waiting.remove(rank)
        record.finish()
        return True

    def abort(self, cause: SpmdError) -> None:
        """End every wait, now and later, with `cause`; the first cause stands."""
        self.cause = self.cause or cause
        for record in list(self._open.values()):
            record.finish()

    def wait(self, record: CallRecord, deadline_s: float) -> bool:
        """Return whether every rank answered `record` in time, or one failed.

        Blocks: for `deadline_s` at most.
        Raises: the cause given to `abort`, and what `on_long_wait` raises.
        """
        done = self.wait_until(lambda: record.done, deadline_s)
        if record.failure is None and record.waiting and self.cause is not None:
            raise self.cause
        return done

    def wait_until(self, done: Callable[[], object], seconds: float) -> bool:
        """Return whether `done()` came true in time. What the recipe's thread waits is counted.

        Blocks: for `seconds` at most. Raises: what `on_long_wait` raises.
        """
        if threading.get_ident() != self._recipe_thread:
            return self._handle_until(done, seconds)
        began = time.monotonic()
        in_time = self._handle_until(done, min(SHORT_WAIT_S, seconds))
        if not in_time and seconds > SHORT_WAIT_S:
            self.on_long_wait()
            left_s = max(0.0, began + seconds - time.monotonic())
            in_time = self._handle_until(done, left_s)
        self.waited_s += time.monotonic() - began
        return in_time

    def close(self, record: CallRecord) -> None:
        """Forget a record that nobody waits for any more."""
        self._open.pop(record.number, None)
        record.files = ()

    def cause_within(self, seconds: float) -> SpmdError | None:
        """Return what has ended the run, if anything does. Blocks: for `seconds` at most."""
        self._handle_until(lambda: self.cause is not None, seconds)
        return self.cause

    def oldest_unanswered(self, rank: int) -> CallRecord | None:
        """Return the oldest call that `rank` has not answered, which is the one it is in."""
        records = list(self._open.values())
        return next((record for record in records if rank in record.waiting), None)

    def num_unanswered(self, rank: int) -> int:
        """Return how many calls `rank` has not answered."""
        return sum(rank in record.waiting for record in list(self._open.values()))
