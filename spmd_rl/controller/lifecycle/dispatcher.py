"""Dispatcher of the controller: it issues commands to the workers and collects their answers."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable
from signal import Signals

from spmd_rl.config.run import RunConfig
from spmd_rl.controller.channel.codec import NOTHING, Packed
from spmd_rl.controller.channel.messages import (
    Bye,
    Command,
    Dying,
    Failure,
    Hello,
    Ping,
    Pong,
    Signalled,
    Stacks,
    ToController,
    encode,
)
from spmd_rl.controller.channel.router import Router
from spmd_rl.controller.channel.secret import Keys
from spmd_rl.controller.channel.shared_arrays import ControllerArrays
from spmd_rl.controller.lifecycle.calls import CallRecord, OpenCalls
from spmd_rl.controller.lifecycle.deadlines import DEATH_NEWS_S
from spmd_rl.controller.lifecycle.error_messages import in_call, remote_error
from spmd_rl.controller.lifecycle.failure_detector import FailureDetector
from spmd_rl.controller.lifecycle.process_tree import parent_of
from spmd_rl.controller.lifecycle.roster import Roster
from spmd_rl.controller.lifecycle.snapshots import Snapshots
from spmd_rl.controller.lifecycle.world_shutdown import WorldShutdown
from spmd_rl.controller.live_counts import sum_counts
from spmd_rl.errors import DeadlineError, LostRankError, RemoteError, SpmdError
from spmd_rl.observe.trace import Trace, now_ns

PING_S = 1.0
BYE_S = 30.0  # how long all ranks may take to stop in order
FAILED_BYE_S = 3.0  # and when the run has failed


class Dispatcher:
    """The controller's end of the connections to all workers.

    The recipe's thread issues and collects. The `on_*` methods run on the thread that leads
    (leader_followers.py). `last_resort` ends the process when the recipe does not notice that the
    run has failed. `shared` are the arrays that the controller shares with all workers, if it can.
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
        shared: ControllerArrays | None = None,
    ) -> None:
        self.shared = shared
        self._router = Router(address, keys, generation, world_size, self, lifeline)
        self.calls = OpenCalls(self._router, run.deadline_s)
        self.on_result = self.calls.record_answer
        self.traces = str(run.traces or "")
        self.trace = Trace(run.traces, "controller")
        self.roster = Roster(world_size, run.lost_after_s)
        self._run = run
        self._snapshots = Snapshots(self.roster)
        self._counts: dict[int, dict[str, int]] = {}  # by rank
        self.on_counts: Callable[[dict[str, int]], None] = lambda counts: None
        self._next_ping = 0.0
        self._ping = Ping(run.lost_after_s, str(run.path.absolute() / "checkpoints"))
        # rank 0 started this process, and its parent is the launcher of this host's ranks
        launcher = parent_of(os.getppid())
        self._shutdown = WorldShutdown(self.roster, self.calls, launcher, last_resort)
        self._detector = FailureDetector(run, self.roster, self.calls, self._shutdown, launcher)
        self.final_message = self._shutdown.final_message
        self.termination = self._detector.termination
        self.recipe_deadline = self._detector.recipe_deadline
        self.endpoint = self._router.endpoint
        self._router.start()

    @property
    def refused(self) -> dict[str, int]:
        """The number of frames that were dropped, by reason."""
        return dict(self._router.refused)

    def catch_signals(self, *numbers: Signals) -> None:
        """Let these signals end the run in order. Call it on the main thread only."""
        self._router.catch_signals(*numbers)

    def wait_for_all(self) -> None:
        """Wait until every rank has said Hello.

        Blocks: for the run's `start_s` at most. Raises: DeadlineError naming the missing ranks.
        """
        complete = self._router.handle_until(
            lambda: not self.roster.missing or self.calls.cause is not None, self._run.start_s
        )
        if self.calls.cause is not None:
            raise self.calls.cause
        if not complete:
            raise DeadlineError(
                f"ranks {self.roster.missing} did not report within {self._run.start_s:g} s"
            )

    def collect(self, record: CallRecord, deadline_s: float | None = None) -> dict[int, Packed]:
        """Return every rank's answer to `record`, by rank.

        Blocks: for `deadline_s` at most, by default the run's.
        Raises: DeadlineError with all stacks saved, LostRankError, or what a rank raised.
        """
        try:
            in_time = self.calls.wait(record, deadline_s)
            if not in_time and (overdue := self._overdue_error(record)):
                raise overdue
            if record.failure is not None:
                raise self._failure_error(record.what, *record.failure)
        finally:
            self.calls.close(record)
            if self.trace.on:
                began_ns, phase = round(record.started * 1e9), record.phase
                self.trace.add(
                    record.what, began_ns, now_ns(), lane="calls", phase=phase, call=record.number
                )
        return record.answers

    def run(
        self, what: str, ranks: tuple[int, ...], command: Command, value: Packed = NOTHING
    ) -> dict[int, Packed]:
        """Have ranks run a command; return their answers by rank, in this order.

        Blocks and raises: as `collect`.
        """
        record = self.calls.open(what, ranks)
        self.calls.issue(record, encode(command), [(ranks, value)])
        answers = self.collect(record)
        return {rank: answers[rank] for rank in ranks}

    def stacks(self) -> str:
        """Return the stacks of all ranks as text. Blocks: for `snapshots.GATHER_S` at most."""
        with self._snapshots.lock:
            self._snapshots.gather(self._router)
            return self._snapshots.text()

    def stop(self, error: SpmdError | None) -> None:
        """Stop every worker, in order or because of `error`, and close the sockets.

        Blocks: until all workers said Bye, for `BYE_S` at most, or for `FAILED_BYE_S` after an
        error. Then it kills those that have not.
        """
        self._shutdown.begin(error)
        self._router.handle_until(lambda: not self.roster.present, FAILED_BYE_S if error else BYE_S)
        if isinstance(error, LostRankError) and error.exit_code == LostRankError.exit_code:
            self._snapshots.save(self._run.path / "stacks")
        self._router.close()
        self._detector.close()
        self.trace.close()
        self._shutdown.kill_remaining()
        if self.shared is not None:
            self.shared.close()

    def on_message(self, rank: int, message: ToController, value: Packed, call: int) -> bool:
        """Accept a worker's message, unless it is a result; False when it was not asked for."""
        now = time.monotonic()
        with self.roster.lock:
            if isinstance(message, Hello):
                return message.rank == rank and self._add_worker(message, now)
            if not self.roster.note_message(rank, now):
                return False
            if isinstance(message, Failure):
                return self.calls.record_failure(call, rank, message)
            self._note(rank, message, value, now)
            return True

    def _note(self, rank: int, message: ToController, value: Packed, now: float) -> None:
        """Act on what a worker tells about itself."""
        match message:
            case Pong(counts):
                self._counts[rank] = counts
                self.on_counts(sum_counts(self._counts.values()))
            case Stacks():
                self._snapshots.store(rank, message, value[1])
            case Signalled(name):
                self.roster.note_signal(rank, name, now)
            case Dying():
                self._detector.on_dying(rank, message)
            case Bye():
                self._shutdown.on_bye(rank)

    def on_tick(self, now: float) -> None:
        """Ping all workers when it is time, and check for failures."""
        if now >= self._next_ping:
            self._next_ping = now + PING_S
            self._router.post(self.roster.present, self._ping)
        self._detector.check(now)

    def on_unreachable(self, rank: int) -> None:
        """Act on the end of the connection to a rank."""
        self._detector.on_unreachable(rank)

    def on_parent_lost(self) -> None:
        """Act on the end of rank 0, the parent of this process."""
        self._detector.on_unreachable(0)

    def on_signal(self, number: Signals) -> None:
        """Act on a signal that the controller itself got."""
        self._detector.on_signal(number)

    def _add_worker(self, hello: Hello, now: float) -> bool:
        if added := self.roster.add(hello, now):
            self._detector.watch(hello)
            self._router.post([hello.rank], self._shutdown.stop_message or self._ping)
        return added

    def _failure_error(self, what: str, rank: int, failure: Failure) -> SpmdError:
        """Return what a rank raised, or the death of another rank that made its collective fail."""
        error = remote_error(what, rank, failure)
        return (isinstance(error, RemoteError) and self.calls.cause_within(DEATH_NEWS_S)) or error

    def _overdue_error(self, record: CallRecord) -> DeadlineError | None:
        """Save every rank's stacks, and return the error that says which ranks hang, and where.

        Returns None if all have answered by then.
        """
        with self._snapshots.lock:
            self._snapshots.gather(self._router)
            if not record.waiting:
                return None
            saved = self._snapshots.save(self._run.path / "stacks")
            unanswered = record.unanswered
            hanging = self._locations(unanswered)
            earlier = self._earlier_calls(record, unanswered)
            self._shutdown.give_up(rank for rank in unanswered if not self._snapshots.has(rank))
        return DeadlineError(f"no answer from {hanging}{earlier}, {in_call(record)}; {saved}")

    def _locations(self, ranks: Iterable[int]) -> str:
        workers = self.roster.workers
        return ", ".join(f"{workers[rank]} {self._snapshots.location(rank)}" for rank in ranks)

    def _earlier_calls(self, record: CallRecord, ranks: Iterable[int]) -> str:
        """Return a clause for each call before `record` that one of the ranks has not answered."""
        earlier = {self.calls.oldest_unanswered(rank) for rank in ranks} - {record, None}
        return "".join(f", still {in_call(call)}" for call in earlier)
