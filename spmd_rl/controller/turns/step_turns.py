"""Turns of ranks that step together and have requests of their own, as those that share experts.

A step of these ranks is a collective, so they must agree on what lies between two steps. A *shared*
command goes to all of them, and all run it in the same turn. A turn begins with an exchange: each
rank tells how many shared commands it has got, how many calls it has not answered, and whether it
has work. All of them run as many as every rank has got, and all take a step if one has work. What
is sent to one rank alone runs there in its order.

While no rank has an unanswered call, nothing is exchanged, and each rank waits for commands by
itself. A command that may leave a call unanswered is shared, so all ranks begin to exchange after
it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from spmd_rl.controller.turns.shard_turns import LostTurnError, asked

C = TypeVar("C")

IDLE_S = 0.002  # between two turns in which no rank has work


class RankState(NamedTuple):
    """What a rank tells the others at the begin of a turn."""

    num_shared: int
    num_unanswered: int
    has_work: int

    @classmethod
    def of(cls, values: Sequence[int]) -> RankState:
        return cls(*values)


class StepTurns(Generic[C]):
    """This rank's part in the turns of its group.

    `exchange` returns the numbers that each rank gives; all ranks of the group enter it.
    `is_shared` says whether a command went to all of them, and `may_open` whether it may leave a
    call unanswered on one of them.
    """

    def __init__(
        self,
        exchange: Callable[[Sequence[int]], Sequence[Sequence[int]]],
        is_shared: Callable[[C], bool],
        may_open: Callable[[C], bool],
    ) -> None:
        self.is_open = False  # a call may be unanswered on a rank of the group
        self.steps = False  # all ranks take a step in this turn
        self._exchange = exchange
        self._is_shared = is_shared
        self._may_open = may_open
        self._waiting: deque[C] = deque()  # commands that no turn has run yet

    def next(
        self, receive: Callable[[float | None], Iterable[C]], num_unanswered: int, has_work: bool
    ) -> list[C]:
        """Begin the next turn, and return its commands.

        `receive(seconds)` returns commands that this rank has got. It waits for one that long at
        most, or with None until there is one. `num_unanswered` and `has_work` are those of this
        rank.
        Blocks: until the other ranks begin the turn; while no call is unanswered, on commands.
        Raises: LostTurnError.
        """
        if not self.is_open:
            self.steps = False
            self._waiting += receive(0.0 if self._waiting else None)
            return self._up_to_opening()
        is_idle = not (self.steps or has_work or self._waiting)
        self._waiting += receive(IDLE_S if is_idle else 0.0)
        return self._first_shared(self._agree(num_unanswered, has_work))

    def start(self, command: C) -> bool:
        """Note that a command starts; return whether a call may be unanswered on some rank now."""
        self.is_open = self.is_open or self._may_open(command)
        return self.is_open

    def _agree(self, num_unanswered: int, has_work: bool) -> int:
        """Exchange what the ranks have; return how many shared commands all of them have got."""
        num_shared = sum(map(self._is_shared, self._waiting))
        try:
            told = asked(self._exchange, RankState(num_shared, num_unanswered, has_work))
        except LostTurnError:
            self.is_open = self.steps = False  # until a command may leave a call unanswered again
            raise
        ranks = [RankState.of(values) for values in told]
        self.steps = any(rank.has_work for rank in ranks)
        self.is_open = any(rank.num_unanswered for rank in ranks)
        return min(rank.num_shared for rank in ranks)

    def _up_to_opening(self) -> list[C]:
        """Take the commands up to the first that may leave a call unanswered."""
        taken: list[C] = []
        while self._waiting:
            taken.append(self._waiting.popleft())
            if self._may_open(taken[-1]):
                break
        return taken

    def _first_shared(self, num_shared: int) -> list[C]:
        """Take so many shared commands, and what came before the next one."""
        taken: list[C] = []
        while self._waiting:
            num_shared -= self._is_shared(self._waiting[0])
            if num_shared < 0:
                break
            taken.append(self._waiting.popleft())
        return taken
