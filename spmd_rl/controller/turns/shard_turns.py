"""Turns of a shard: its ranks run the same commands between the same two pumps of a role.

The ranks of a tensor-parallel engine step together, so their schedulers must see the same requests
in every step. The first rank decides: before each turn it tells the others how many commands it
runs now, and which calls it has answered since the last turn. Only it hears of graders and other
things outside, so a call of the shard ends when it ends there.
Source: mini-sglang broadcasts the number of messages that its first rank has received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import msgspec

C = TypeVar("C")
Given = TypeVar("Given")
Told = TypeVar("Told")


class LostTurnError(Exception):
    """A rank could not be asked, most likely because it is gone; its cause says more."""


def asked(exchange: Callable[[Given], Told], given: Given) -> Told:
    """Return what the ranks of a turn tell each other by `exchange`, a collective.

    Raises: LostTurnError.
    """
    try:
        return exchange(given)
    except RuntimeError as error:  # as collectives raise it
        raise LostTurnError(str(error)) from error


class ShardTurn(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What the ranks of a shard do next: answer calls, run `num_commands`, and pump."""

    answered: list[int]
    num_commands: int


class ShardNews(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What a role of the first rank tells its other ranks before it goes on."""

    news: bytes


class ShardTurns(Generic[C]):
    """This rank's part in the turns of its shard.

    `broadcast` returns the bytes that the first rank gives; all ranks of the shard enter it.
    `is_shared` says whether a command went to all ranks of the shard. Others are run as they come.
    All methods that wait for other ranks raise a LostTurnError where one is gone.
    """

    def __init__(
        self,
        is_first: bool,
        broadcast: Callable[[bytes], bytes],
        is_shared: Callable[[C], bool],
    ) -> None:
        self.is_first = is_first
        self._broadcast = broadcast
        self._is_shared = is_shared
        self._answered: list[int] = []  # by the first rank, since its last turn
        self._early: deque[C] = deque()  # shared commands that no turn has asked for yet
        self._turn: ShardTurn | None = None  # the next one, heard before it was asked for

    @property
    def has_untold(self) -> bool:
        """Whether the other ranks do not know yet of a call that this one has answered."""
        return bool(self._answered)

    def take_early(self) -> list[C]:
        """Return the first shared command that came before its turn, where no turn will come.

        The last turn answers calls. What follows them may be here before the turn has ended. The
        first rank takes commands one by one until a call is unanswered, and so must this one: a
        turn counts those that come after such a call.
        """
        return [self._early.popleft()] if self._early else []

    def note_answered(self, number: int) -> None:
        """Note that a call was answered here."""
        if self.is_first:
            self._answered.append(number)

    def lead(self, commands: Iterable[C]) -> None:
        """Begin a turn that runs these commands. Blocks: until the other ranks begin it."""
        turn = ShardTurn(self._answered, sum(map(self._is_shared, commands)))
        self._answered = []
        asked(self._broadcast, msgspec.msgpack.encode(turn))

    def follow(
        self, receive: Callable[[bool], Iterable[C]], release: Callable[[Iterable[int]], None]
    ) -> list[C]:
        """Begin the next turn, and return its commands.

        `receive(wait)` returns commands that this rank has got, and `release` answers calls.
        Blocks: until the first rank begins the turn, and its commands are here too.
        """
        turn, self._turn = self._turn or self._hear(ShardTurn), None
        release(turn.answered)
        commands: list[C] = []
        num_shared = 0
        received = [*self._early, *receive(False)]
        self._early.clear()
        while True:
            for command in received:
                is_shared = self._is_shared(command)
                is_early = is_shared and num_shared == turn.num_commands
                (self._early if is_early else commands).append(command)
                num_shared += is_shared and not is_early
            if num_shared == turn.num_commands:
                return commands
            received = list(receive(True))

    def tell(self, news: bytes) -> None:
        """Tell the other ranks of a role what its first rank does now.

        Blocks: until they `hear`.
        """
        asked(self._broadcast, msgspec.msgpack.encode(ShardNews(news)))

    def hear(self) -> bytes | None:
        """Return what the first rank tells; None where it begins a turn instead, as its role has
        nothing to do.

        Blocks: until the first rank does either.
        """
        heard = self._hear(ShardNews | ShardTurn)
        if isinstance(heard, ShardNews):
            return heard.news
        self._turn = heard
        return None

    def _hear(self, kind: Any) -> Any:
        return msgspec.msgpack.decode(asked(self._broadcast, b""), type=kind)
