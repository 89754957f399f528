"""Turns of a shard: its ranks run the same commands in each of them, however these arrive."""

from __future__ import annotations

import queue
import random
from collections import deque
from functools import partial
from typing import Any, cast

import msgspec
import pytest

from spmd_rl.controller.channel.dealer import Dealer
from spmd_rl.controller.deferred import Deferred
from spmd_rl.controller.running_calls import DeferredCall
from spmd_rl.controller.turns.shard_turns import LostTurnError, ShardTurn, ShardTurns
from spmd_rl.controller.worker import Worker
from spmd_rl.mesh.role_context import Meshes
from spmd_rl.mesh.world import World
from tests.shared_ranks import on_ranks

Command = tuple[str, int]
DEADLINE_S = 60  # in which a rank must hear of a turn
ALONE = World(rank=0, size=1, local_rank=0, local_size=1, node=0, run_id="test", restart=0)


def is_shared(command: Command) -> bool:
    return command[0] == "shared"


class Follower:
    """The second rank of a shard, to which commands arrive in chunks."""

    def __init__(self, arriving: list[Command], rng: random.Random) -> None:
        self.told: deque[bytes] = deque()
        self.released: list[int] = []
        self._arriving, self._rng = deque(arriving), rng
        self.turns = ShardTurns[Command](False, lambda _: self.told.popleft(), is_shared)

    def turn(self) -> list[Command]:
        return self.turns.follow(self._receive, self.released.extend)

    def _receive(self, wait: bool) -> list[Command]:
        count = self._rng.randint(0, 4) if not wait else min(1, len(self._arriving))
        return [self._arriving.popleft() for _ in range(min(count, len(self._arriving)))]


@pytest.mark.parametrize("seed", range(20))
def test_ranks_run_the_same_shared_commands_in_each_turn(seed: int) -> None:
    rng = random.Random(seed)
    shared = [("shared", number) for number in range(30)]
    arriving: list[Command] = list(shared)
    for number in range(10):  # other commands to the second rank alone
        arriving.insert(rng.randint(0, len(arriving)), ("own", number))
    follower = Follower(arriving, rng)

    def broadcast(turn: bytes) -> bytes:
        follower.told.append(turn)
        return turn

    first = ShardTurns[Command](True, broadcast, is_shared)
    unsent, answered, ran = deque(shared), [], []
    while unsent or len(ran) < len(arriving):
        now = [unsent.popleft() for _ in range(rng.randint(0, min(4, len(unsent))))]
        if rng.random() < 0.5:
            answered.append(len(answered))
            first.note_answered(answered[-1])
        first.lead(now)
        commands = follower.turn()
        assert [command for command in commands if is_shared(command)] == now
        assert follower.released == answered
        ran += commands
    assert [command for command in ran if is_shared(command)] == shared
    own = [command for command in arriving if not is_shared(command)]
    assert [command for command in ran if not is_shared(command)] == own


def test_what_follows_the_last_turn_may_be_here_before_it_ends() -> None:
    """No turn asks for it then: it is the worker's next command."""
    early = [("shared", 1), ("shared", 2)]
    told = msgspec.msgpack.encode(ShardTurn([7], 1))
    turns = ShardTurns[Command](False, lambda _: told, is_shared)
    released: list[int] = []
    assert turns.follow(lambda wait: [("shared", 0), *early], released.extend) == [("shared", 0)]
    assert released == [7]
    worker = Worker(Meshes(ALONE))
    worker._shard = turns  # type: ignore[assignment]
    dealer = cast(Dealer, None)  # nothing is received
    for command in early:  # one by one, as the first rank takes them
        assert worker._next_turn(dealer) == [command]  # type: ignore[comparison-overlap]
    assert turns.take_early() == []


class Arriving:
    """What a `Dealer` gives a rank: commands in order, how many at once is chance.

    Nobody waits while a call in `running` may be answered from outside.
    """

    def __init__(self, commands: list[Command], rng: random.Random, running: list[Any]) -> None:
        self._commands, self._rng, self._running = deque(commands), rng, running

    def next(self, answers: object, *, wait: bool, **_: object) -> list[Command]:
        if wait and not self._commands:
            assert self._running, "waits for a command that never comes"
            return []
        count = 1 if wait else min(self._rng.randint(0, 3), len(self._commands))
        return [self._commands.popleft() for _ in range(count)]


class Rank:
    """A rank that serves until it has run `commands`; every second one is a deferred call."""

    def __init__(self, turns: ShardTurns[Command], commands: list[Command], seed: int) -> None:
        self.rng = random.Random(seed)
        self.open: list[Deferred[None]] = []
        self.dealer = cast(Dealer, Arriving(commands, self.rng, self.open))
        self.turns, self.worker, self.num_commands = turns, Worker(Meshes(ALONE)), len(commands)
        self.worker._shard = turns  # type: ignore[assignment]
        self.worker._running.holds_answers = not turns.is_first
        self.ran: list[list[Command]] = []

    def serve(self) -> None:
        running = self.worker._running
        while running.num_unanswered or sum(map(len, self.ran)) < self.num_commands:
            self.ran.append(cast(list[Command], self.worker._next_turn(self.dealer)))
            for _, number in self.ran[-1]:
                if number % 2:
                    self.start(number)
            # only the first rank hears what ends a call; the others answer when it did
            for call in list(self.open):
                if not self.turns.is_first or self.rng.random() < 0.5:
                    self.open.remove(call)
                    call.resolve(None)
        if self.turns.has_untold:
            self.turns.lead([])

    def start(self, number: int) -> None:
        deferred = Deferred[None]()
        self.open.append(deferred)
        answered = partial(self.turns.note_answered, number)
        call = DeferredCall("role", number, deferred, lambda _: answered())
        self.worker._running.defer(call)


@pytest.mark.parametrize("seed", range(40))
def test_ranks_may_serve_with_and_without_turns(seed: int) -> None:
    """Calls end, so that there are no turns, and others begin; commands arrive in any chunks."""
    told: queue.Queue[bytes] = queue.Queue()
    commands: list[Command] = [("shared", number) for number in range(60)]
    first = Rank(ShardTurns(True, lambda blob: told.put(blob) or blob, is_shared), commands, seed)
    hear = partial(told.get, timeout=DEADLINE_S)
    other = Rank(ShardTurns(False, lambda _: hear(), is_shared), commands, 1000 + seed)
    ranks = (first, other)
    on_ranks(lambda index: ranks[index].serve(), len(ranks))
    for rank in ranks:
        assert [command for turn in rank.ran for command in turn] == commands


def test_what_a_role_tells_comes_before_the_next_turn() -> None:
    """A role whose first rank does not pump hears of the turn that begins instead."""
    told: deque[bytes] = deque()

    def broadcast(blob: bytes) -> bytes:
        told.append(blob)
        return blob

    first = ShardTurns[Command](True, broadcast, is_shared)
    other = ShardTurns[Command](False, lambda _: told.popleft(), is_shared)
    first.tell(b"one step")
    first.note_answered(3)
    first.lead([("shared", 1)])
    assert other.hear() == b"one step"
    assert other.hear() is None
    assert not told
    released: list[int] = []
    assert other.follow(lambda wait: [("shared", 1)], released.extend) == [("shared", 1)]
    assert released == [3]
    first.lead([])
    assert other.follow(lambda wait: [], released.extend) == []


def fail(error: Exception) -> ShardTurns[Command]:
    """Return the turns of a first rank whose broadcasts fail."""

    def broadcast(data: bytes) -> bytes:
        raise error

    return ShardTurns(True, broadcast, is_shared)


def test_a_turn_is_lost_where_a_collective_fails() -> None:
    reset = RuntimeError("Connection reset by peer")
    for call in (lambda: fail(reset).lead([]), lambda: fail(reset).tell(b""), fail(reset).hear):
        with pytest.raises(LostTurnError, match="reset by peer") as lost:
            call()
        assert lost.value.__cause__ is reset


def test_another_error_is_no_lost_turn() -> None:
    with pytest.raises(ValueError, match="ours"):
        fail(ValueError("ours")).lead([])
