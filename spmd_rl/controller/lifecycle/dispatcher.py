"""Between the recipe's thread and the sockets: issue commands, collect answers, notice deaths, end
the world.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from signal import Signals

from spmd_rl.config.run import RunConfig
from spmd_rl.controller.channel.codec import Packed
from spmd_rl.controller.channel.router import Router, Values
from spmd_rl.controller.channel.secret import Keys
from spmd_rl.controller.channel.wire import (
    Bye,
    Dying,
    Failure,
    Hello,
    Ping,
    Signalled,
    StackRequest,
    Stacks,
    Stop,
    ToController,
)
from spmd_rl.controller.lifecycle import exit_message
from spmd_rl.controller.lifecycle.calls import CallRecord, Calls
from spmd_rl.controller.lifecycle.deadlines import Notice, RecipeClock
from spmd_rl.controller.lifecycle.error_messages import in_call, lost_error, remote_error
from spmd_rl.controller.lifecycle.process_tree import (
    ChildWatcher,
    await_end,
    end_children,
    parent_of,
)
from spmd_rl.controller.lifecycle.roster import Roster
from spmd_rl.controller.lifecycle.shutdown import Farewell
from spmd_rl.controller.lifecycle.snapshots import Snapshots
from spmd_rl.controller.lifecycle.stacks import place_of_main_thread
from spmd_rl.errors import DeadlineError, LostRankError, RemoteError, SpmdError
from spmd_rl.observe.trace import Trace, now_ns

PING_S = 1.0
STACKS_S = 2.0  # how long all ranks may take to send their stacks
ECHO_S = 1.5  # how long a failed collective may be ahead of the news of a death; more than PING_S
BYE_S = 30.0  # how long all ranks may take to stop in order
FAILED_BYE_S = 3.0  # and when the run has failed
LAST_RESORT_S = 5.0  # how long the recipe may go on after that


class Dispatcher:
    """The controller's end of every conversation. Its `on_*` methods run in the turns of the
    sockets (turns.py).

    `last_resort` ends the process when the recipe does not notice that the run has failed.
    """

    def __init__(
        self,
        run: RunConfig,
        world_size: int,
        address: str,
        keys: Keys,
        generation: int,
        lifeline: socket.socket,
        last_resort: Callable[[int], object] = os._exit,
    ) -> None:
        self.calls = Calls(self._until)
        self.on_result = self.calls.answer
        self.traces = str(run.traces or "")
        self.trace = Trace(run.traces, "controller")
        self.roster = Roster(world_size, run.lost_after_s)
        self._run = run
        # rank 0's parent is the launcher of this host's ranks
        self._launcher = parent_of(os.getppid())
        self._lives = ChildWatcher(self._launcher)
        self._last_resort = last_resort
        self._lock = threading.RLock()  # the roster's
        self._snapshots = Snapshots()
        self._gathering = threading.Lock()
        self._lost: set[int] = set()  # those whom nobody waits for: they are killed last
        self._next_ping = 0.0
        self._ping = Ping(run.lost_after_s, str(run.path.absolute() / "checkpoints"))
        self.notice, self.farewell = Notice(), Farewell()
        self.recipe_clock = RecipeClock(run.between_calls_s)
        self._stop: Stop | None = None  # once the world is ending: what every rank is told
        self._told: list[int] = []  # the ranks that stayed when it began to
        self._unsaid = False  # why it ends, until one of them has heard it, who says so
        self._router = Router(address, keys, generation, world_size, self, lifeline)
        self.endpoint = self._router.endpoint
        self._router.start()

    @property
    def refused(self) -> dict[str, int]:
        """How many frames were dropped, by reason."""
        return dict(self._router.refused)

    def take_signals(self, *numbers: Signals) -> None:
        """Let these signals end the run in order. Call it on the main thread only."""
        self._router.take_signals(*numbers)

    def wait_for_all(self) -> None:
        """Wait until every rank has said Hello.

        Blocks: for the run's `start_s` at most. Raises: DeadlineError naming who has not come.
        """
        come = self._until(
            lambda: not self.roster.missing or self.calls.cause is not None, self._run.start_s
        )
        if self.calls.cause is not None:
            raise self.calls.cause
        if not come:
            raise DeadlineError(
                f"ranks {self.roster.missing} did not report within {self._run.start_s:g} s"
            )

    def issue(self, record: CallRecord, command: bytes, values: Values) -> None:
        """Send a command's header to the record's ranks, in order with all others."""
        self._router.post_each(command, values, record.number)

    def collect(self, record: CallRecord, deadline_s: float | None = None) -> dict[int, Packed]:
        """Every rank's answer to `record`, by rank.

        Blocks: for `deadline_s` at most, the run's unless given.
        Raises: DeadlineError with all stacks saved, LostRankError, or what a rank raised.
        """
        try:
            in_time = self.calls.wait(
                record, self._run.deadline_s if deadline_s is None else deadline_s
            )
            if not in_time and (overdue := self._overdue(record)):
                raise overdue
            if record.failure is not None:
                raise self._failed(record.what, *record.failure)
        finally:
            self.calls.close(record)
            if self.trace.on:
                began_ns, phase = round(record.started * 1e9), record.phase
                self.trace.add(
                    record.what, began_ns, now_ns(), lane="calls", phase=phase, call=record.number
                )
        return record.answers

    def stacks(self) -> str:
        """The stacks of all ranks, as text. Blocks: for `STACKS_S` at most."""
        with self._gathering:
            self._gather()
            titles = {
                rank: str(self.roster.seats.get(rank, f"rank {rank}"))
                for rank in range(self.roster.world_size)
            }
            return self._snapshots.text(titles)

    def stop(self, error: SpmdError | None) -> None:
        """End every worker, orderly or because of `error`, and close the sockets.

        Blocks: until all said Bye; `BYE_S` ends it, or `FAILED_BYE_S`, and then those that can be
        are killed.
        """
        self._end_all(error)
        self._until(lambda: not self.roster.staying, FAILED_BYE_S if error else BYE_S)
        if isinstance(error, LostRankError) and error.exit_code == LostRankError.exit_code:
            self._snapshots.save(self._run.path / "stacks", self.roster.world_size)
        self._router.close()
        self._lives.close()
        self.trace.close()
        self._kill()

    def on_message(self, rank: int, message: ToController, value: Packed, call: int) -> bool:
        """Take a worker's message, unless it is a result; False when it was not asked for."""
        now = time.monotonic()
        with self._lock:
            if isinstance(message, Hello):
                return message.rank == rank and self._seat(message, now)
            if not self.roster.heard(rank, now):
                return False
            match message:
                case Failure():
                    return self.calls.failed(call, rank, message)
                case Stacks():
                    self._snapshots.take(rank, message, value[1])
                case Signalled(name):
                    self.roster.signalled(rank, name, now)
                case Dying(why):
                    self._fail(
                        LostRankError(
                            f"{self.roster.seats[rank]} {why}, {in_call(self.calls.oldest(rank))}"
                        )
                    )
                    self.roster.gone(rank)
                case Bye():
                    self._unsaid = False
                    self.roster.gone(rank)
            return True

    def on_tick(self, now: float) -> None:
        """Ping everybody, and see who is lost."""
        if now >= self._next_ping:
            self._next_ping = now + PING_S
            self._router.post(self.roster.staying, self._ping)
        for rank in self._lives.ended():
            self.on_unreachable(rank)
        if lost := self.roster.lost(now):
            self._fail(self._lost_error(lost, now), lost)
        elif ended := self.roster.ended_by(now):
            self.notice.take(*ended, now)
        owed = any(map(self.calls.oldest, range(self.roster.world_size)))
        if late := self.recipe_clock.overdue(owed, self.calls.waited_s, now):
            self._fail(DeadlineError(f"{late}: the controller is at {place_of_main_thread()}"))
        if end := self.notice.overdue(now):
            self._fail(end)

    def on_unreachable(self, rank: int) -> None:
        """A rank's connection is closed; unless all are stopping, that ends the run."""
        self._fail(self._lost_error([rank], time.monotonic()), [rank])
        with self._lock:
            self.roster.gone(rank)

    def on_parent_lost(self) -> None:
        """Rank 0, our parent, is gone."""
        self.on_unreachable(0)

    def on_signal(self, number: Signals) -> None:
        """Somebody ends the controller itself."""
        self.notice.take(number.name, f"the controller got {number.name}", time.monotonic())

    def _seat(self, hello: Hello, now: float) -> bool:
        if seated := self.roster.hello(hello, now):
            self._lives.watch(hello)
            self._router.post([hello.rank], self._stop or self._ping)
        return seated

    def _fail(self, cause: SpmdError, lost: Sequence[int] = ()) -> None:
        """End the run in a turn of the sockets: the recipe may be busy, and hears of it at its next
        wait.
        """
        if self._stop is not None:
            return
        self._lost.update(lost)
        self.calls.fail(cause)
        self._end_all(cause)
        last_resort = threading.Timer(LAST_RESORT_S, self._leave, [cause.exit_code])
        last_resort.daemon = True
        last_resort.start()

    def _leave(self, exit_code: int) -> None:
        self._kill()
        self._last_resort(exit_code)

    def _end_all(self, error: SpmdError | None) -> None:
        with self._lock:
            if self._stop is not None:
                return
            seats, staying = self.roster.seats, self.roster.staying
            lost = [seats[rank].hello for rank in self._lost & seats.keys()]
            stop = (
                Stop(self.farewell.take(error), error.exit_code, lost) if error else Stop("", 0, [])
            )
            self._stop, self._told, self._unsaid = (
                stop,
                staying,
                error is not None and bool(staying),
            )
            if self._lost >= set(staying):
                self._say(stop)
            self._router.post(staying, stop)
            for rank in self._lost:
                self.roster.gone(rank)

    def _kill(self) -> None:
        """End what has not ended, on this host, once the launcher has seen the others' last words.

        Who came after the world began to end is told so at once, and left to it.
        """
        if self._stop is not None:
            self._say(self._stop)
        seats = self.roster.seats
        stayed = set(self._told) & set(self.roster.staying)
        left = [seats[rank].hello for rank in (self._lost | stayed) & seats.keys()]
        if left and self._launcher is not None:
            await_end([seat.hello for seat in seats.values() if seat.hello not in left])
            end_children(self._launcher, left)

    def _say(self, stop: Stop) -> None:
        """Leave the last words as rank 0, which started this process, if no rank is left to do it."""
        if self._unsaid:
            self._unsaid = False
            exit_message.write_alone(stop.sentence)

    def _lost_error(self, ranks: Sequence[int], now: float) -> LostRankError:
        owed = next(filter(None, map(self.calls.oldest, ranks)), None)
        return lost_error(ranks, self.roster.seats, now, owed, self._router.refused_of(ranks[0]))

    def _failed(self, what: str, rank: int, failure: Failure) -> SpmdError:
        """What a rank raised, or the death of another that it was only the echo of, in a
        collective.
        """
        error = remote_error(what, rank, failure)
        return (isinstance(error, RemoteError) and self.calls.cause_within(ECHO_S)) or error

    def _overdue(self, record: CallRecord) -> DeadlineError | None:
        """Save every rank's stacks, and say who owes what since when, and where it is; None if
        nobody does by then.
        """
        with self._gathering:
            self._gather()
            if not record.waiting:
                return None
            saved = self._snapshots.save(self._run.path / "stacks", self.roster.world_size)
            who = ", ".join(
                f"{self.roster.seats[rank]} {self._snapshots.place(rank)}" for rank in record.owing
            )
            stuck = {self.calls.oldest(rank) for rank in record.owing} - {record, None}
            self._lost.update(rank for rank in record.owing if not self._snapshots.has(rank))
            earlier = "".join(f", still {in_call(call)}" for call in stuck)
        return DeadlineError(f"no answer from {who}{earlier}, {in_call(record)}; {saved}")

    def _gather(self) -> None:
        asked = self.roster.staying
        self._snapshots.forget()
        self._router.post(asked, StackRequest())
        self._until(lambda: self._snapshots.has_all({*asked} & {*self.roster.staying}), STACKS_S)

    def _until(self, done: Callable[[], bool], seconds: float) -> bool:
        return self._router.until(done, seconds)
