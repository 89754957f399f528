"""Turns of ranks that step together: workers in threads, each with commands that come as they like.

Steps, pushes and other collectives are meetings. All ranks must come to the same ones in the same
order, whatever each has heard when.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from spmd_rl.controller.capabilities import InTurns, Pumped
from spmd_rl.controller.channel.codec import NOTHING, pack
from spmd_rl.controller.channel.messages import Abort, Call, CallBeside, Stop
from spmd_rl.controller.deferred import Deferred
from spmd_rl.controller.endpoint import Role, Sharded, collective, concurrent, routed
from spmd_rl.controller.routing import Route
from spmd_rl.controller.turns.step_turns import StepTurns
from spmd_rl.controller.worker import Worker
from spmd_rl.mesh.split import Placement


class Stuck(Exception):
    """The ranks wait for each other, or are in different collectives."""


class Meeting:
    """A collective in which ranks tell what they have come for. It is over for all if it fails."""

    def __init__(self, num_ranks: int) -> None:
        self.held: list[str] = []
        self._num_ranks = num_ranks
        self._changed = threading.Condition()
        self._here: dict[int, tuple[str, Any]] = {}
        self._told: list[Any] = []
        self._num_gone = 0
        self._failed = ""

    def meet(self, rank: int, label: str, value: Any = None) -> list[Any]:
        """Return what each rank gives, once all are here."""
        with self._changed:
            number = len(self.held)
            self._here[rank] = label, value
            if len(self._here) == self._num_ranks:
                labels = {label for label, _ in self._here.values()}
                if len(labels) > 1:
                    self._fail(f"ranks came for {labels}")
                self._told = [value for _, (_, value) in sorted(self._here.items())]
                self._here = {}
                self.held.append(label)
                self._changed.notify_all()
            self._check()
            while len(self.held) == number and not self._failed:
                self._changed.wait()
            if self._failed:
                raise Stuck(self._failed)
            return self._told

    def leave(self) -> None:
        """Note that a rank comes no more."""
        with self._changed:
            self._num_gone += 1
            self._check()

    def _check(self) -> None:
        if self._here and len(self._here) + self._num_gone == self._num_ranks:
            self._fail(f"nobody else comes for {self._here}")

    def _fail(self, why: str) -> None:
        self._failed = why
        self._changed.notify_all()


class Engine(Role, Pumped, InTurns):
    """Requests that take some steps each. A step is a meeting, and so is a push."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        placement = Placement("infer", (0, 1, 2), {"dp": 1, "fsdp": 3, "tp": 1, "ep": 3})
        world = SimpleNamespace(rank=rank)
        context = SimpleNamespace(
            placement=placement, world=world, shard_size=1, shard_rank=0, trace=None
        )
        context.all_gather_numbers = lambda numbers, along: meeting.meet(rank, "turn", numbers)
        super().__init__(None, context)  # type: ignore[arg-type]
        self._rank, self._meeting = rank, meeting
        self.left: dict[Deferred[list[int]], int] = {}

    @concurrent
    @routed(lambda steps: Route(0, None, 0))  # type: ignore[arg-type]
    def complete(self, steps: int) -> Deferred[list[int]]:
        return self._begin(steps)

    @concurrent
    @collective
    def generate(self, steps: Sharded[list[int]]) -> Deferred[Sharded[list[int]]]:
        """Ranks need different numbers of steps, and some of them none."""
        return self._begin(steps[self._rank])

    @concurrent
    @collective
    def push(self) -> None:
        self._meeting.meet(self._rank, "push")

    @collective
    def sleep(self) -> None:
        assert not self.left
        self._meeting.meet(self._rank, "sleep")

    def has_work(self) -> bool:
        return bool(self.left)

    def watched(self) -> Sequence[int]:
        return ()

    def pump(self) -> None:
        raise AssertionError("ranks that step together are not pumped alone")

    def pump_in_step(self, steps: bool) -> None:
        if steps:
            self._meeting.meet(self._rank, "step")
        for answer in list(self.left) if steps else ():
            self.left[answer] -= 1
            if not self.left[answer]:
                self._end(answer)

    def pump_in_shard(self, turns: Any) -> None:
        raise AssertionError("no rank shares a shard")

    def _begin(self, steps: int) -> Deferred[list[int]]:
        answer = Deferred[list[int]](lambda: self._end(answer))
        self.left[answer] = steps
        if not steps:
            self._end(answer)
        return answer

    def _end(self, answer: Deferred[list[int]]) -> None:
        self.left.pop(answer)
        answer.resolve([1])


class Dealer:
    """Hands out the commands of a rank, a few at a time, then Stop."""

    def __init__(self, commands: Sequence[Any], rng: random.Random) -> None:
        self._commands, self._rng = deque(commands), rng
        self.answered: list[int] = []

    def next(self, answers: Sequence[Any], *, wait: bool, watched: Any, seconds: float) -> Any:
        self.answered += [number for _, _, number in answers]
        waits = wait and seconds > 0.1
        count = self._rng.randint(1 if waits else 0, 3)
        taken = [self._commands.popleft() for _ in range(min(count, len(self._commands)))]
        return taken or ([(Stop("", 0, []), NOTHING, 0)] if waits else [])


def commands(rng: random.Random, count: int) -> tuple[list[list[Any]], list[str]]:
    """Return the commands of each of three ranks, and the collectives among them."""
    of_ranks: list[list[Any]] = [[], [], []]
    expected = []
    for number in range(1, count + 1):
        kind = rng.choice(["complete", "complete", "generate", "push", "sleep", "abort"])
        if kind == "complete":
            serving = rng.randrange(3)
            for rank, received in enumerate(of_ranks):
                call = Call("engine", "complete", "", True), pack((rng.randint(1, 4),)), number
                received.append(
                    call if rank == serving else (CallBeside("engine", True), NOTHING, number)
                )
        elif kind == "abort":  # of a call that may have ended long ago, or not begun
            if started := [one for one in of_ranks[0] if type(one[0]) in (Call, CallBeside)]:
                struck = rng.choice(started)[2]
                for received in of_ranks:
                    if any(one[2] == struck and type(one[0]) is Call for one in received):
                        received.append((Abort(), NOTHING, struck))
        else:
            value = pack(([rng.randint(0, 3) for _ in range(3)],) if kind == "generate" else ())
            for received in of_ranks:
                received.append((Call("engine", kind, "", kind != "sleep"), value, number))
            if kind != "generate":
                expected.append(kind)
    return of_ranks, expected


def run(of_ranks: list[list[Any]], seed: int) -> tuple[Meeting, list[Dealer]]:
    """Serve the commands of each rank in a thread. Raises: what a rank has raised."""
    meeting, raised = Meeting(3), list[BaseException]()
    dealers = [
        Dealer(received, random.Random(seed + rank)) for rank, received in enumerate(of_ranks)
    ]

    def serve(rank: int) -> None:
        engine = Engine(rank, meeting)
        worker = Worker(SimpleNamespace(neighbours={"engine": engine}))  # type: ignore[arg-type]
        worker._join_turns("engine", engine)
        try:
            worker.serve(SimpleNamespace(dealer=dealers[rank]))  # type: ignore[arg-type]
            dealers[rank].answered += [number for _, _, number in worker._answers]
        except BaseException as error:  # the thread of the test raises it
            raised.append(error)
        finally:
            meeting.leave()

    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
    return meeting, dealers


@pytest.mark.parametrize("seed", range(30))
def test_ranks_come_to_the_same_collectives(seed: int) -> None:
    rng = random.Random(seed)
    of_ranks, expected = commands(rng, 25)
    meeting, dealers = run(of_ranks, seed)
    assert [one for one in meeting.held if one in ("push", "sleep")] == expected
    for received, dealer in zip(of_ranks, dealers, strict=True):
        calls = [number for command, _, number in received if type(command) is Call]
        assert Counter(dealer.answered) == Counter(calls)


def test_a_rank_that_cannot_ask_another_answers_with_an_error_and_lives_on() -> None:
    """So that the controller can say which rank is gone."""

    def broken(values: Sequence[int]) -> Any:
        raise RuntimeError("Connection reset by peer")

    meeting = Meeting(1)
    engine = Engine(0, meeting)
    calls = [(Call("engine", "complete", "", False), pack((3,)), number) for number in range(2)]
    dealer = Dealer(calls, random.Random(0))
    worker = Worker(SimpleNamespace(neighbours={"engine": engine}))  # type: ignore[arg-type]
    worker._join_turns("engine", engine)
    worker._steps = StepTurns(broken, lambda received: True, lambda received: True)
    worker.serve(SimpleNamespace(dealer=dealer))  # type: ignore[arg-type]
    assert dealer.answered + [number for _, _, number in worker._answers] == [0, 1]
    assert meeting.held == []


def test_nothing_is_exchanged_while_no_call_is_unanswered() -> None:
    pushes = [(Call("engine", "push", "", True), pack(()), number) for number in range(5)]
    meeting, _ = run([list(pushes) for _ in range(3)], 0)
    assert meeting.held == ["push"] * 5


@pytest.mark.parametrize("broken", ["all that has come", "no word of others' calls"])
def test_ranks_get_stuck_without_an_agreement(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: a rank runs what it has got, or does not hear of calls to others."""
    if broken == "all that has come":
        monkeypatch.setattr(StepTurns, "_first_shared", lambda self, num: _all(self._waiting))
    stuck = 0
    for seed in range(30):
        of_ranks, _ = commands(random.Random(seed), 25)
        if broken != "all that has come":
            of_ranks = [
                [one for one in received if type(one[0]) is not CallBeside] for received in of_ranks
            ]
        try:
            run(of_ranks, seed)
        except Stuck:
            stuck += 1
    assert stuck > 10


def _all(waiting: deque[Any]) -> list[Any]:
    taken = list(waiting)
    waiting.clear()
    return taken
