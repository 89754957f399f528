"""Roster of the workers: when each was last heard, and which are lost. Time is an argument."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from spmd_rl.controller.channel.messages import Hello

# The longest that a launcher takes to signal all its ranks, once it has signalled one.
SIGNAL_ALL_S = 2.0
# How much later than it was sent the last message of a rank that is gone may be read.
LATE_S = 0.5
# For a rank without a signal to answer a ping, which is sent every second.
ANSWER_PING_S = 4.0
MAX_NAMED = 4  # ranks in a sentence


@dataclass
class WorkerState:
    """One worker, as the controller knows it.

    `signal` names the first signal that its launcher sent it. `gone` means that it answers no more.
    """

    hello: Hello
    heard: float
    signal: str = ""
    gone: bool = False

    def __str__(self) -> str:
        return str(self.hello)


class Roster:
    """The workers of a world of known size.

    A thread that changes it, or reads it together with something else, holds `lock`.
    """

    def __init__(self, world_size: int, lost_after_s: float) -> None:
        self.world_size = world_size
        self.lost_after_s = lost_after_s
        self.workers: dict[int, WorkerState] = {}
        self.lock = threading.RLock()
        # A terminal and the launcher both send the first. A launcher that gets a second one sends
        # one of another name.
        self.got_second_signal = False
        self._first_signal_at: float | None = None

    def add(self, hello: Hello, now: float) -> bool:
        """Add a worker; False when the world has no such rank or has it already."""
        if not 0 <= hello.rank < self.world_size or hello.rank in self.workers:
            return False
        self.workers[hello.rank] = WorkerState(hello, now)
        return True

    def note_message(self, rank: int, now: float) -> bool:
        """Note a sign of life; False when the rank never said Hello."""
        if worker := self.workers.get(rank):
            worker.heard = now
        return worker is not None

    def note_signal(self, rank: int, name: str, now: float) -> None:
        """Note that its launcher sent a worker the signal `name`."""
        worker = self.workers[rank]
        self.got_second_signal |= worker.signal not in ("", name)
        worker.signal = worker.signal or name
        if self._first_signal_at is None:
            self._first_signal_at = now

    def note_gone(self, rank: int) -> None:
        """Note that a worker said Bye, or has ended."""
        if rank in self.workers:
            self.workers[rank].gone = True

    @property
    def missing(self) -> list[int]:
        """The ranks that have not said Hello yet."""
        return [rank for rank in range(self.world_size) if rank not in self.workers]

    @property
    def present(self) -> list[int]:
        """The ranks that said Hello and are not gone."""
        return [rank for rank, worker in self.workers.items() if not worker.gone]

    def lost(self, now: float) -> list[int]:
        """Return the ranks to give up.

        A rank is lost when it was silent for too long. Once launchers send signals, a rank that got
        one may be silent, and a rank that got none is lost when it does not answer pings.
        """
        silent = [
            rank for rank in self.present if now - self.workers[rank].heard > self.lost_after_s
        ]
        if self._first_signal_at is None:
            return silent
        unheard = self._unheard if now - self._first_signal_at > ANSWER_PING_S else []
        return [
            rank
            for rank in self.present
            if rank in unheard or (rank in silent and not self.workers[rank].signal)
        ]

    def terminated_by(self, now: float) -> tuple[str, str] | None:
        """Return the signal that ends the run, and the sentence that says who got it.

        A signal ends the run when every present rank got one, or when some did while all others
        are still alive after `SIGNAL_ALL_S`.
        """
        signalled = [worker for worker in self.workers.values() if worker.signal]
        if self._first_signal_at is None or not signalled:
            return None
        every = all(self.workers[rank].signal for rank in self.present)
        if not every and (self._unheard or now - self._first_signal_at <= SIGNAL_ALL_S):
            return None
        return signalled[0].signal, self._signal_sentence(signalled, every)

    def _signal_sentence(self, signalled: list[WorkerState], every: bool) -> str:
        """Return who got a signal; `every` says whether all ranks that are present did."""
        name = signalled[0].signal
        if every and not self.missing:
            return f"every rank got {name}"
        who = ", ".join(map(str, signalled[:MAX_NAMED]))
        more = f" and {len(signalled) - MAX_NAMED} more" if len(signalled) > MAX_NAMED else ""
        early = f" before ranks {self.missing} had reported" if self.missing else ""
        return f"{who}{more} got {name}{early}"

    @property
    def _unheard(self) -> list[int]:
        """The ranks that got no signal, and were not heard since others got one."""
        since = (self._first_signal_at or 0.0) + LATE_S
        return [
            rank
            for rank in self.present
            if not self.workers[rank].signal and self.workers[rank].heard < since
        ]
