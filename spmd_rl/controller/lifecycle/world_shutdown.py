"""Shutdown of the world: the controller tells every worker to stop, and kills those that hang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from spmd_rl.controller.channel.messages import Stop
from spmd_rl.controller.lifecycle import exit_message
from spmd_rl.controller.lifecycle.calls import OpenCalls
from spmd_rl.controller.lifecycle.process_tree import kill_children, wait_for_exits
from spmd_rl.controller.lifecycle.roster import Roster
from spmd_rl.controller.lifecycle.shutdown import FinalMessage
from spmd_rl.errors import SpmdError

LAST_RESORT_S = 5.0  # how long the recipe may go on after the run has failed


class WorldShutdown:
    """Ends the world once, in order or because of an error.

    `launcher` is the pid of the launcher of this host's ranks. `last_resort` ends the process when
    the recipe does not notice that the run has failed.
    """

    def __init__(
        self,
        roster: Roster,
        calls: OpenCalls,
        launcher: int | None,
        last_resort: Callable[[int], object],
    ) -> None:
        self.final_message = FinalMessage()
        self.stop_message: Stop | None = None  # what every rank is told, once the shutdown began
        self._roster = roster
        self._calls = calls
        self._launcher = launcher
        self._last_resort = last_resort
        self._given_up: set[int] = set()  # ranks that nobody waits for; they are killed last
        self._present_at_stop: list[int] = []
        # whether no rank has confirmed yet that it heard why the run ends, so as to report it
        self._unreported = False

    def fail(self, cause: SpmdError, lost: Iterable[int] = ()) -> None:
        """End the run because of `cause`, and give up the ranks that are `lost`.

        The thread that leads calls it. The recipe may be busy: it gets `cause` at its next wait.
        """
        if self.stop_message is not None:
            return
        self.give_up(lost)
        self._calls.abort(cause)
        self.begin(cause)
        last_resort = threading.Timer(LAST_RESORT_S, self._exit, [cause.exit_code])
        last_resort.daemon = True
        last_resort.start()

    def give_up(self, ranks: Iterable[int]) -> None:
        """Wait no longer for `ranks` once the shutdown begins."""
        self._given_up.update(ranks)

    def begin(self, error: SpmdError | None) -> None:
        """Tell every worker to stop, in order or because of `error`; only the first call counts."""
        with self._roster.lock:
            if self.stop_message is not None:
                return
            stop, present = self._stop_for(error), self._roster.present
            self.stop_message, self._present_at_stop = stop, present
            self._unreported = error is not None and bool(present)
            if self._given_up >= set(present):
                self._report(stop)
            self._calls.router.post(present, stop)
            for rank in self._given_up:
                self._roster.note_gone(rank)

    def _stop_for(self, error: SpmdError | None) -> Stop:
        if error is None:
            return Stop("", 0, [])
        workers = self._roster.workers
        lost = [workers[rank].hello for rank in self._given_up & workers.keys()]
        return Stop(self.final_message.compose(error), error.exit_code, lost)

    def on_bye(self, rank: int) -> None:
        """Note that a worker has stopped; it reports why the run ends."""
        self._unreported = False
        self._roster.note_gone(rank)

    def kill_remaining(self) -> None:
        """Kill the workers of this host that have not ended.

        It first waits until the launcher has seen the exit messages of the others. A worker that
        said Hello after the shutdown began was told so then, and is left to end by itself.
        """
        if self.stop_message is not None:
            self._report(self.stop_message)
        workers = self._roster.workers
        hanging = set(self._present_at_stop) & set(self._roster.present)
        remaining = [workers[rank].hello for rank in (self._given_up | hanging) & workers.keys()]
        if remaining and self._launcher is not None:
            hellos = [worker.hello for worker in workers.values()]
            wait_for_exits([hello for hello in hellos if hello not in remaining])
            kill_children(self._launcher, remaining)

    def _exit(self, exit_code: int) -> None:
        self.kill_remaining()
        self._last_resort(exit_code)

    def _report(self, stop: Stop) -> None:
        """Leave the exit message in place of rank 0, if no rank is left to do it.

        This process can: rank 0 started it.
        """
        if self._unreported:
            self._unreported = False
            exit_message.write_for_all_ranks(stop.sentence)
