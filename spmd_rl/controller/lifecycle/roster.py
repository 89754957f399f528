"""Who is here: the workers that said Hello, when each was last heard, and who is lost. Pure; time
is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

from spmd_rl.controller.channel.wire import Hello

FAREWELL_S = 2.0  # how long the launcher may take to signal all ranks once it has signalled one
LATE_S = 0.5  # how much later than it was sent the last message of a rank that is gone may be read
SHOW_S = 4.0  # for a rank without a signal to show that it lives; it is pinged every second
MOST_SHOWN = 4  # ranks in a sentence


@dataclass
class Seat:
    """One worker as the controller knows it. `signal` is what its launcher ends it by; `gone`: it
    answers no more.
    """

    hello: Hello
    heard: float
    signal: str = ""
    gone: bool = False

    def __str__(self) -> str:
        return f"rank {self.hello.rank} (host {self.hello.host}, pid {self.hello.pid})"


class Roster:
    """The seats of a world of known size."""

    def __init__(self, world_size: int, lost_after_s: float) -> None:
        self.world_size = world_size
        self.lost_after_s = lost_after_s
        self.seats: dict[int, Seat] = {}
        self._ending_since: float | None = None

    def hello(self, hello: Hello, now: float) -> bool:
        """Seat a worker; False when there is no such seat or it is taken."""
        if not 0 <= hello.rank < self.world_size or hello.rank in self.seats:
            return False
        self.seats[hello.rank] = Seat(hello, now)
        return True

    def heard(self, rank: int, now: float) -> bool:
        """Note a sign of life; False when the rank never said Hello."""
        if seat := self.seats.get(rank):
            seat.heard = now
        return seat is not None

    def signalled(self, rank: int, name: str, now: float) -> None:
        """Note that its launcher is ending a worker."""
        self.seats[rank].signal = name
        if self._ending_since is None:
            self._ending_since = now

    def gone(self, rank: int) -> None:
        """Note that a worker said Bye, or is no more."""
        if rank in self.seats:
            self.seats[rank].gone = True

    @property
    def missing(self) -> list[int]:
        """The ranks that have not come yet."""
        return [rank for rank in range(self.world_size) if rank not in self.seats]

    @property
    def staying(self) -> list[int]:
        """The ranks that came and are not gone."""
        return [rank for rank, seat in self.seats.items() if not seat.gone]

    def lost(self, now: float) -> list[int]:
        """The ranks given up: silent for too long, or neither signalled nor heard since others were
        signalled.
        """
        silent = [rank for rank in self.staying if now - self.seats[rank].heard > self.lost_after_s]
        if self._ending_since is None:
            return silent
        mute = self._mute if now - self._ending_since > SHOW_S else []
        return [
            rank
            for rank in self.staying
            if rank in mute or (rank in silent and not self.seats[rank].signal)
        ]

    def ended_by(self, now: float) -> tuple[str, str] | None:
        """The signal that ends the run and who got it: every rank that stays, or some while the
        others live on.
        """
        signalled = [seat for seat in self.seats.values() if seat.signal]
        if self._ending_since is None or not signalled:
            return None
        every = all(self.seats[rank].signal for rank in self.staying)
        if not every and (self._mute or now - self._ending_since <= FAREWELL_S):
            return None
        name = signalled[0].signal
        if every and not self.missing:
            return name, f"every rank got {name}"
        who = ", ".join(map(str, signalled[:MOST_SHOWN]))
        more = f" and {len(signalled) - MOST_SHOWN} more" if len(signalled) > MOST_SHOWN else ""
        early = f" before ranks {self.missing} had reported" if self.missing else ""
        return name, f"{who}{more} got {name}{early}"

    @property
    def _mute(self) -> list[int]:
        """The ranks that were not signalled, and were not heard since others were."""
        since = (self._ending_since or 0.0) + LATE_S
        return [
            rank
            for rank in self.staying
            if not self.seats[rank].signal and self.seats[rank].heard < since
        ]
