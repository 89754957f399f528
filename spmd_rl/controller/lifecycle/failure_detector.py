"""Failure detector of the controller: it notices lost ranks, signals and a recipe that hangs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from signal import SIGINT, Signals

from spmd_rl.config.run import RunConfig
from spmd_rl.controller.channel.messages import Dying, Hello, refusals
from spmd_rl.controller.lifecycle.calls import OpenCalls
from spmd_rl.controller.lifecycle.deadlines import RecipeDeadline, TerminationNotice
from spmd_rl.controller.lifecycle.error_messages import in_call
from spmd_rl.controller.lifecycle.process_tree import ChildWatcher
from spmd_rl.controller.lifecycle.roster import Roster
from spmd_rl.controller.lifecycle.stacks import main_thread_location
from spmd_rl.controller.lifecycle.world_shutdown import WorldShutdown
from spmd_rl.errors import DeadlineError, LostRankError

# for the last messages of a rank to be read, once its connection or its process has ended
LAST_MESSAGES_S = 0.25


class FailureDetector:
    """Decides that a run has failed, and begins its shutdown.

    The thread that leads (leader_followers.py) calls its methods.
    """

    def __init__(
        self,
        run: RunConfig,
        roster: Roster,
        calls: OpenCalls,
        shutdown: WorldShutdown,
        launcher: int | None,
    ) -> None:
        self.termination = TerminationNotice()
        self.recipe_deadline = RecipeDeadline(run.between_calls_s)
        self._roster = roster
        self._calls = calls
        self._shutdown = shutdown
        self._children = ChildWatcher(launcher)
        self._unreachable: dict[int, float] = {}  # since when, by rank

    def watch(self, hello: Hello) -> None:
        """Watch the process of a worker, if it is on this host."""
        self._children.watch(hello)

    def close(self) -> None:
        """Stop watching processes."""
        self._children.close()

    def check(self, now: float) -> None:
        """End the run if a rank is lost, a signal ends it, or the recipe hangs."""
        silent = [r for r, since in self._unreachable.items() if now - since >= LAST_MESSAGES_S]
        for rank in [*self._children.ended(), *silent]:
            self._lose(rank, now)
        if lost := self._roster.lost(now):
            self._shutdown.fail(self._lost_error(lost, now), lost)
        elif termination := self._roster.terminated_by(now):
            self._note_signal(*termination, now)
            if self._roster.got_second_signal:
                self.termination.end_grace()
        self._check_recipe(now)
        if error := self.termination.overdue(now):
            self._shutdown.fail(error)

    def _check_recipe(self, now: float) -> None:
        """End the run if the recipe hangs."""
        ranks = range(self._roster.world_size)
        unanswered = any(map(self._calls.oldest_unanswered, ranks))
        if late := self.recipe_deadline.overdue(unanswered, self._calls.waited_s, now):
            location = main_thread_location()
            self._shutdown.fail(DeadlineError(f"{late}: the controller is at {location}"))

    def on_unreachable(self, rank: int) -> None:
        """Note the end of a rank's connection, or of rank 0.

        A rank that ends itself says why in its last message, which may not have been read yet.
        """
        self._unreachable.setdefault(rank, time.monotonic())

    def on_dying(self, rank: int, dying: Dying) -> None:
        """Act on a worker that ends itself."""
        worker, record = self._roster.workers[rank], self._calls.oldest_unanswered(rank)
        self._shutdown.fail(LostRankError(f"{worker} {dying.sentence}, {in_call(record)}"))
        self._roster.note_gone(rank)

    def on_signal(self, number: Signals) -> None:
        """Act on a signal that the controller itself got.

        A batch system may send SIGTERM again, which changes nothing.
        """
        recipients = f"the controller got {number.name}"
        is_first = self._note_signal(number.name, recipients, time.monotonic())
        if not is_first and SIGINT.name in (number.name, self.termination.name):
            self.termination.end_grace()

    def _note_signal(self, name: str, recipients: str, now: float) -> bool:
        """Note a signal, and tell who typed Ctrl-C that the run saves; False if it is a second."""
        is_first = self.termination.note_signal(name, recipients, now)
        if is_first and name == SIGINT.name and (grace_s := self.termination.grace_s):
            print(
                f"{recipients}: the run saves after this step and ends, within run.grace_s = "
                f"{grace_s:g} s; a second Ctrl-C ends it at once",
                flush=True,
            )
        return is_first

    def _lose(self, rank: int, now: float) -> None:
        """Act on a rank that is gone: it ends the run, unless all stop."""
        self._unreachable.pop(rank, None)
        self._shutdown.fail(self._lost_error([rank], now), [rank])
        with self._roster.lock:
            self._roster.note_gone(rank)

    def _lost_error(self, ranks: Sequence[int], now: float) -> LostRankError:
        """Return the error that says which of `ranks` are lost, since when, and in which call."""
        refused = refusals(self._calls.router.refused_of(ranks[0]))
        seen = [self._roster.workers[rank] for rank in ranks if rank in self._roster.workers]
        if not seen:
            return LostRankError(
                f"lost rank {ranks[0]} before it had reported to the controller{refused}"
            )
        silence_s = max(now - worker.heard for worker in seen)
        record = next(filter(None, map(self._calls.oldest_unanswered, ranks)), None)
        return LostRankError(
            f"lost {', '.join(map(str, seen))}, last heard {silence_s:.1f} s ago, "
            f"{in_call(record)}{refused}"
        )
