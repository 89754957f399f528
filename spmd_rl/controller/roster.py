"""Who is here: the workers that said Hello, when each was last heard, and who is lost. Pure; time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

from spmd_rl.controller.wire import Hello

FAREWELL_S = 2.0  # how long the launcher may take to signal all ranks once it has signalled one


@dataclass
class Seat:
    """One worker as the controller knows it. `signal` is what its launcher ends it by; `gone`: it answers no more."""

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
        """The ranks given up: silent for too long, or not signalled when the launcher ended the others."""
        if self._ending_since is not None and now - self._ending_since > FAREWELL_S:
            return [rank for rank in self.staying if not self.seats[rank].signal]
        return [rank for rank in self.staying if now - self.seats[rank].heard > self.lost_after_s]

    @property
    def ended_by(self) -> str | None:
        """The signal that every rank that stays was given, once all were."""
        staying = [self.seats[rank] for rank in self.staying]
        if self._ending_since is None or not all(seat.signal for seat in staying):
            return None
        return next((seat.signal for seat in self.seats.values() if seat.signal), None)
