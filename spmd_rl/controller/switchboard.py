"""Between the recipe's thread and the sockets: issue commands, collect answers, notice deaths, end the world."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

from spmd_rl import errors
from spmd_rl.controller.calls import CallRecord, Calls
from spmd_rl.controller.codec import Packed
from spmd_rl.controller.config import RunConfig
from spmd_rl.controller.roster import Roster
from spmd_rl.controller.router import Router
from spmd_rl.controller.secret import Keys
from spmd_rl.controller.wire import (
    Bye,
    Failure,
    Hello,
    Message,
    Ping,
    Result,
    StackRequest,
    Stacks,
    Stop,
    ToController,
)
from spmd_rl.errors import DeadlineError, LostRankError, RemoteError, SpmdError

PING_S = 1.0
STACKS_S = 2.0  # how long all ranks may take to send their stacks
ECHO_S = 1.5  # how long a failed collective may be ahead of the news of a death; more than PING_S
BYE_S = 30.0  # how long all ranks may take to stop in order
FAILED_BYE_S = 3.0  # and when the run has failed
LAST_RESORT_S = 10.0  # how long the recipe may go on after that


class Switchboard:
    """The controller's end of every conversation. Its `on_*` methods run on the socket thread."""

    def __init__(
        self,
        run: RunConfig,
        world_size: int,
        address: str,
        keys: Keys,
        generation: int,
        lifeline: socket.socket,
    ) -> None:
        self.calls = Calls()
        self.roster = Roster(world_size, run.lost_after_s)
        self._run = run
        self._changed = threading.Condition()  # the roster or the stacks
        self._stacks: dict[int, str] = {}
        self._next_ping = 0.0
        self._stopping = False
        self._router = Router(address, keys, generation, self, lifeline)
        self.endpoint = self._router.endpoint

    def wait_for_all(self) -> None:
        """Wait until every rank has said Hello.

        Blocks: for the run's `start_s` at most. Raises: DeadlineError naming who has not come.
        """
        with self._changed:
            come = self._changed.wait_for(lambda: not self.roster.missing or self.calls.cause, self._run.start_s)
        if self.calls.cause is not None:
            raise self.calls.cause
        if not come:
            raise DeadlineError(f"ranks {self.roster.missing} did not report within {self._run.start_s:g} s")

    def post(self, ranks: tuple[int, ...], message: Message, payload: bytes = b"") -> None:
        """Send a message to each of `ranks`, in order with all others."""
        self._router.post(ranks, message, payload)

    def collect(self, record: CallRecord, deadline_s: float | None = None) -> list[Packed]:
        """Every rank's answer to `record`, in the order of its ranks.

        Blocks: for `deadline_s` at most, the run's unless given.
        Raises: DeadlineError with all stacks saved, LostRankError, or what a rank raised.
        """
        try:
            if not self.calls.wait(record, self._run.deadline_s if deadline_s is None else deadline_s):
                raise self._overdue(record)
            if record.failure is not None:
                raise self._failed(record.what, *record.failure)
        finally:
            self.calls.close(record)
        return [answer for rank in record.ranks if isinstance(answer := record.answers[rank], Packed)]

    def stop(self, error: SpmdError | None) -> None:
        """End every worker, orderly or because of `error`, and close the sockets.

        Blocks: until all said Bye; `BYE_S` ends it, or `FAILED_BYE_S`.
        """
        self._end_all(error)
        with self._changed:
            self._changed.wait_for(lambda: not self.roster.staying, FAILED_BYE_S if error else BYE_S)
        self._router.close()

    def on_message(self, rank: int, message: ToController, payload: bytes) -> bool:
        """Take a worker's message; False when it was not asked for."""
        now = time.monotonic()
        with self._changed:
            self._changed.notify_all()
            if isinstance(message, Hello):
                return message.rank == rank and self.roster.hello(message, now)
            if not self.roster.heard(rank, now):
                return False
            match message:
                case Result(call, value):
                    return self.calls.answer(call, rank, Packed(bytes(value), payload))
                case Failure(call):
                    return self.calls.answer(call, rank, message)
                case Stacks(text):
                    self._stacks[rank] = text
                case Bye(reason):
                    self.roster.bye(rank, reason, now)
            return True

    def on_tick(self, now: float) -> None:
        """Ping everybody, and see who is lost."""
        if now >= self._next_ping:
            self._next_ping = now + PING_S
            self._router.post(self.roster.staying, Ping(self._run.lost_after_s))
        if lost := self.roster.lost(now):
            self._fail(self._lost(lost, now))
        elif reason := self.roster.ended_by:
            missing = self.roster.missing
            who = f"ranks {missing} ended before they reported" if missing else f"every rank got {reason}"
            self._fail(LostRankError(f"the run was ended from outside: {who}"))

    def on_unreachable(self, rank: int) -> None:
        """A rank's connection is closed; unless all are stopping, that ends the run."""
        now = time.monotonic()
        self._fail(self._lost([rank], now))
        with self._changed:
            self.roster.gone(rank)
            self._changed.notify_all()

    def on_parent_lost(self) -> None:
        """Rank 0, our parent, is gone."""
        self.on_unreachable(0)

    def _fail(self, cause: SpmdError) -> None:
        """End the run from the socket thread: the recipe may be busy, and hears of it at its next wait."""
        if self._stopping:
            return
        self.calls.fail(cause)
        self._end_all(cause)
        last_resort = threading.Timer(LAST_RESORT_S, os._exit, [cause.exit_code])
        last_resort.daemon = True
        last_resort.start()

    def _end_all(self, error: SpmdError | None) -> None:
        if not self._stopping:
            self._stopping = True
            stop = Stop(str(error), error.exit_code) if error else Stop("", 0)
            self._router.post(list(self.roster.seats), stop)

    def _lost(self, ranks: list[int], now: float) -> LostRankError:
        """Who is lost, and in which call."""
        known = [self.roster.seats[rank] for rank in ranks if rank in self.roster.seats]
        who = ", ".join(str(seat) for seat in known) or f"rank {ranks[0]}"
        silence_s = max((now - seat.heard for seat in known), default=0.0)
        owed = next(filter(None, map(self.calls.oldest, ranks)), None)
        return LostRankError(f"lost {who}, last heard {silence_s:.1f} s ago, {describe(owed)}")

    def _failed(self, what: str, rank: int, failure: Failure) -> SpmdError:
        """What a rank raised, or the death of another that it was only the echo of, in a collective."""
        error = remote_error(what, rank, failure)
        return (isinstance(error, RemoteError) and self.calls.cause_within(ECHO_S)) or error

    def _overdue(self, record: CallRecord) -> DeadlineError:
        """Save every rank's stacks, and say who owes what since when."""
        who = ", ".join(str(self.roster.seats[rank]) for rank in record.owing)
        folder = self._save_stacks()
        return DeadlineError(f"no answer from {who} {describe(record)}; the stacks of all ranks are in {folder}")

    def _save_stacks(self) -> Path:
        folder = self._run.path / "stacks"
        folder.mkdir(parents=True, exist_ok=True)
        asked = set(self.roster.staying)
        self._router.post(list(asked), StackRequest())
        with self._changed:
            self._changed.wait_for(lambda: asked <= set(self._stacks), STACKS_S)
            for rank in range(self.roster.world_size):
                text = self._stacks.pop(rank, "no answer: the process is stopped or holds the interpreter lock\n")
                (folder / f"rank_{rank}.txt").write_text(text)
        return folder


def describe(record: CallRecord | None) -> str:
    """Which call, in which phase, for how long."""
    if record is None:
        return "between calls"
    phase = f" (phase {record.phase})" if record.phase else ""
    return f"in {record.what}{phase} after {record.age_s:.1f} s"


def remote_error(what: str, rank: int, failure: Failure) -> SpmdError:
    """The error of a worker, here: one of our own kinds as it was, anything else as a RemoteError."""
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, SpmdError) and kind is not RemoteError:
        error = kind.__new__(kind)
        error.args = (failure.sentence,)
        error.add_note(f"rank {rank}, {what}:\n{failure.traceback}")
        return error
    role, _, call = what.partition(".")
    return RemoteError(
        rank=rank,
        role=role,
        call=call,
        kind=failure.kind,
        sentence=failure.sentence,
        remote_traceback=failure.traceback,
        exit_code=failure.exit_code,
    )
