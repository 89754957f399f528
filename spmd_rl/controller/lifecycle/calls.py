"""Calls in flight: who has not answered yet, what came back, and what ends every wait."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

from spmd_rl.controller.channel.codec import NOTHING, Packed
from spmd_rl.controller.channel.messages import Abort, Failure, encode
from spmd_rl.controller.channel.router import SHORT_WAIT_S, Post, Router, Values
from spmd_rl.controller.channel.shared_arrays import SharedFile
from spmd_rl.controller.pending import StartedCall
from spmd_rl.errors import SpmdError

_ABORT = encode(Abort())


class CallRecord(StartedCall):
    """One issued command. `what` is its name in messages ("trainer.train_step").

    `files` are those that its arguments lie in; they stay until all ranks have answered.
    """

    def __init__(
        self,
        calls: OpenCalls,
        number: int,
        what: str,
        ranks: tuple[int, ...],
        files: Sequence[SharedFile],
    ) -> None:
        self._calls = calls
        self.number = number
        self.what = what
        self.ranks = ranks
        self.phase = calls.phase
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

    @property
    def seconds_left(self) -> float:
        return self._calls.deadline_s - self.age_s

    def abort(self) -> None:
        if not self.done:
            self._calls.issue(self, _ABORT, [(self.ranks, NOTHING)])

    def wake(self) -> None:
        self._calls.router.wake()

    def handle_until(self, done: Callable[[], object], seconds: float) -> bool:
        return self._calls.wait_until(done, seconds)

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
    """The records of all calls in flight, each of which may take `deadline_s`.

    The thread that leads (leader_followers.py) records answers.
    `on_long_wait` is called once in each wait of the recipe's thread that is not short; it may take
    a few milliseconds. The recipe's thread is the one that makes this object.
    """

    def __init__(self, router: Router, deadline_s: float) -> None:
        self.router = router
        self.deadline_s = deadline_s
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
        record = CallRecord(self, next(self._numbers), what, ranks, files)
        self._open[record.number] = record
        if self.cause is not None:
            self.close(record)
            raise self.cause
        return record

    def issue(
        self, record: CallRecord, command: bytes, values: Values, also: Sequence[Post] = ()
    ) -> None:
        """Send the header of a command to the ranks of `record`, in order with all others, and what
        is to go `also`.
        """
        self.router.post_each(command, values, record.number, also)

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

    def wait(self, record: CallRecord, deadline_s: float | None = None) -> bool:
        """Return whether every rank answered `record` in time, or one failed.

        Blocks: for `deadline_s` at most, by default the run's.
        Raises: the cause given to `abort`, and what `on_long_wait` raises.
        """
        wait_s = self.deadline_s if deadline_s is None else deadline_s
        done = self.wait_until(lambda: record.done, wait_s)
        if record.failure is None and record.waiting and self.cause is not None:
            raise self.cause
        return done

    def wait_until(self, done: Callable[[], object], seconds: float) -> bool:
        """Return whether `done()` came true in time. What the recipe's thread waits is counted.

        Blocks: for `seconds` at most. Raises: what `on_long_wait` raises.
        """
        if threading.get_ident() != self._recipe_thread:
            return self.router.handle_until(done, seconds)
        began = time.monotonic()
        in_time = self.router.handle_until(done, min(SHORT_WAIT_S, seconds))
        if not in_time and seconds > SHORT_WAIT_S:
            self.on_long_wait()
            left_s = max(0.0, began + seconds - time.monotonic())
            in_time = self.router.handle_until(done, left_s)
        self.waited_s += time.monotonic() - began
        return in_time

    def close(self, record: CallRecord) -> None:
        """Forget a record that nobody waits for any more."""
        self._open.pop(record.number, None)
        record.files = ()

    def cause_within(self, seconds: float) -> SpmdError | None:
        """Return what has ended the run, if anything does. Blocks: for `seconds` at most."""
        self.router.handle_until(lambda: self.cause is not None, seconds)
        return self.cause

    def oldest_unanswered(self, rank: int) -> CallRecord | None:
        """Return the oldest call that `rank` has not answered, which is the one it is in."""
        records = list(self._open.values())
        return next((record for record in records if rank in record.waiting), None)

    def num_unanswered(self, rank: int) -> int:
        """Return how many calls `rank` has not answered."""
        return sum(rank in record.waiting for record in list(self._open.values()))
