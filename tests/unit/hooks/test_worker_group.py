"""Decisions of a group of workers, with workers and a clock of the test."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from spmd_rl.errors import ConfigError, SpmdError
from spmd_rl.hooks.rank.worker_group import AHEAD_S, START_DEADLINE_S, Limits, WorkerGroup
from spmd_rl.hooks.wire.channel import NO_CALL
from spmd_rl.hooks.wire.messages import (
    Answer,
    Answers,
    Cancel,
    Problem,
    Ready,
    Result,
    ToProcess,
    ToRank,
)

DEADLINE_S = 30.0


@dataclass(eq=False)
class FakeWorker:
    """A worker whose process does what the test says."""

    started_s: float
    calls: dict[int, bool] = field(default_factory=dict)
    is_ready: bool = False
    is_fresh: bool = True
    is_alone: bool = False
    is_retired: bool = False
    is_garbled: bool = False
    tail: str = "its last words"
    inbox: deque[ToRank] = field(default_factory=deque)
    note: tuple[int, float] = (NO_CALL, 0.0)
    exit: str = ""
    closed: bool = False
    sent: list[ToProcess] = field(default_factory=list)

    def send(self, message: ToProcess) -> None:
        self.sent.append(message)

    def receive(self) -> list[ToRank]:
        messages = list(self.inbox)
        self.inbox.clear()
        return messages

    def running(self) -> tuple[int, float]:
        return self.note

    def ending(self) -> str:
        return self.exit

    def close(self) -> None:
        self.closed = True

    def answer(self, *answers: Answer) -> None:
        self.inbox.append(Answers(list(answers)))


class Scene:
    """A group, its workers and a clock."""

    def __init__(self, *, workers: int = 1, concurrency: int = 0, deadline_s: float = DEADLINE_S):
        self.now_s = 100.0
        self.started: list[FakeWorker] = []
        self._given: list[list[int]] = []
        self.group = WorkerGroup(Limits(workers, concurrency, deadline_s), self._new_worker)

    def _new_worker(self) -> Any:
        self.started.append(FakeWorker(self.now_s))
        return self.started[-1]

    def add(self, *call_ids: int) -> None:
        self.group.add(call_ids)

    def turn(self) -> list[Answer]:
        """Read and assign; return the answers that stand."""
        read = [message for _, message in self.group.read(self.now_s)]
        self._given += [call_ids for _, call_ids in self.group.assign(self.now_s)]
        return [one for message in read if isinstance(message, Answers) for one in message.answers]

    def make_ready(self) -> None:
        for worker in self.started:
            if not worker.closed:
                worker.inbox.append(Ready([]))
        self.turn()

    def given(self) -> list[list[int]]:
        """Return what workers were given since the last look."""
        given, self._given = self._given, []
        return given


def done(call_id: int, seconds: float = 1e-5) -> Result:
    return Result(call_id, seconds, [], {})


def lost(call_id: int, problem: str) -> Problem:
    """What is said of a call whose process ended, or was ended, before it had answered."""
    return Problem(call_id, 0.0, problem, unanswered=True)


def ready_scene(**limits: Any) -> Scene:
    """A scene with one worker that has answered two calls quickly."""
    scene = Scene(**limits)
    scene.add(-2, -1)
    scene.turn()
    scene.make_ready()
    for call_id in (-2, -1):
        scene.started[0].answer(done(call_id))
        scene.turn()
    scene.given()
    return scene


def test_a_worker_is_started_for_the_first_call_and_gets_it_once_it_is_ready() -> None:
    scene = Scene(workers=2)
    scene.turn()
    assert scene.started == []
    scene.add(1, 2, 3, 4, 5)
    scene.turn()
    assert len(scene.started) == 1 and scene.given() == []
    scene.make_ready()
    assert scene.given() == [[1]], "the time of a call is not known yet"
    scene.started[0].answer(done(1, seconds=60))
    assert scene.turn() == [done(1, seconds=60)]
    assert scene.given() == [[2]], "the first call does not count"
    scene.started[0].answer(done(2))
    scene.turn()
    assert scene.given() == [[3, 4, 5]]


def test_calls_are_sent_ahead_for_a_short_time_only() -> None:
    scene = ready_scene()
    scene.add(1)
    scene.turn()
    scene.started[0].answer(done(1, seconds=AHEAD_S))
    scene.turn()
    scene.given()
    scene.add(*range(2, 50))
    scene.turn()
    (given,) = scene.given()
    assert 1 <= len(given) < 15, "a tenth of AHEAD_S a call in the mean"


def test_another_worker_is_started_only_if_the_work_that_waits_is_long() -> None:
    scene = ready_scene(workers=2)
    scene.add(*range(1, 500))
    scene.turn()
    assert len(scene.started) == 1, "each of them takes 10 us"
    slow = Scene(workers=2)
    slow.add(1, 2, 3)
    slow.turn()
    slow.make_ready()
    slow.started[0].note = 1, slow.now_s
    slow.now_s += AHEAD_S / 2
    slow.turn()
    assert len(slow.started) == 1, "the next call may be quick"
    slow.now_s += AHEAD_S
    slow.turn()
    assert len(slow.started) == 2
    for _ in range(3):
        slow.now_s += 2 * AHEAD_S
        slow.turn()
    assert len(slow.started) == 2, "the bound is two"


def test_a_slow_first_call_asks_for_no_other_worker() -> None:
    """It may have imported something, or a busy machine has kept it from running."""
    scene = Scene(workers=2)
    scene.add(*range(200))
    scene.turn()
    scene.make_ready()
    scene.started[0].answer(done(0, seconds=1.0))
    scene.turn()
    assert scene.given() == [[0], [1]]
    scene.started[0].answer(done(1))
    scene.turn()
    scene.now_s += 2 * AHEAD_S
    scene.turn()
    assert len(scene.started) == 1


def test_waiting_calls_are_spread_over_the_workers() -> None:
    scene = ready_scene(workers=2)
    scene.group.start()
    scene.make_ready()
    scene.add(*range(1, 8))
    scene.turn()
    assert sorted(map(len, scene.given())) == [3, 4]


def test_an_end_is_charged_to_the_call_that_ran() -> None:
    scene = ready_scene()
    scene.add(1, 2, 3)
    scene.turn()
    assert scene.given() == [[1, 2, 3]]
    worker = scene.started[0]
    worker.answer(done(1))
    worker.note, worker.exit = (2, scene.now_s), "ended its process with SIGSEGV"
    assert scene.turn() == [done(1), lost(2, "ended its process with SIGSEGV")]
    assert worker.closed and len(scene.started) == 2
    scene.make_ready()
    assert scene.given() == [[3]], "it has not run before"


@pytest.mark.parametrize("fault", ["exit", "garbage", "an answered call"])
def test_where_nobody_knows_the_call_each_is_made_alone(fault: str) -> None:
    scene = ready_scene(concurrency=8)
    scene.add(1, 2, 3)
    scene.turn()
    first = scene.started[0]
    if fault == "garbage":
        first.is_garbled, first.note = True, (1, scene.now_s)
    else:
        first.exit = "ended its process with SIGKILL"
    if fault == "an answered call":
        first.note = -1, scene.now_s
    assert scene.turn() == []
    scene.given()
    scene.add(4)
    scene.make_ready()
    assert scene.given() == [[1]]
    scene.started[1].answer(done(1))
    scene.turn()
    assert scene.given() == [[2]]
    # in this process another call has run before, which may have left something behind
    scene.started[1].exit = "ended its process with SIGKILL"
    assert scene.turn() == []
    scene.make_ready()
    assert scene.given() == [[2]], "it is next, in a fresh process"
    scene.started[2].exit = "ended its process with SIGKILL"
    assert scene.turn() == [lost(2, "ended its process with SIGKILL")]
    scene.make_ready()
    assert scene.given() == [[3]]
    scene.started[3].answer(done(3))
    assert scene.turn() == [done(3)]
    assert scene.given() == [[4]]


def test_a_call_that_runs_for_too_long_ends_its_process() -> None:
    scene = ready_scene()
    scene.add(1, 2)
    scene.turn()
    worker = scene.started[0]
    worker.note = 1, scene.now_s
    scene.now_s += DEADLINE_S
    assert scene.turn() == [] and not worker.closed
    scene.now_s += 0.1
    assert scene.turn() == [lost(1, "took longer than 30 s")]
    assert worker.closed


def test_a_call_that_answers_just_before_it_is_ended_is_not_late() -> None:
    """Its answer is in the socket, though nothing was read of it."""
    scene = ready_scene()
    scene.add(1)
    scene.turn()
    worker = scene.started[0]

    class Finishing(FakeWorker):
        def receive(self) -> list[ToRank]:
            self.note = NO_CALL, 0.0
            return [Answers([done(1)])]

    worker.__class__ = Finishing
    worker.note = 1, scene.now_s
    scene.now_s += DEADLINE_S + 1
    assert scene.turn() == [done(1)]
    assert not worker.closed


def test_without_a_deadline_a_call_may_take_as_long_as_it_likes() -> None:
    scene = ready_scene(deadline_s=0)
    scene.add(1)
    scene.turn()
    scene.started[0].note = 1, scene.now_s
    scene.now_s += 1e6
    assert scene.turn() == []


def test_a_problem_in_doubt_is_looked_at_again_in_a_fresh_process() -> None:
    scene = ready_scene()
    scene.add(1, 2)
    scene.turn()
    problem = Problem(1, 0.0, "raised OSError", in_doubt=True, retires=True)
    scene.started[0].answer(problem)
    scene.started[0].exit = "ended its process with exit code 0"
    assert scene.turn() == []
    scene.given()
    scene.make_ready()
    assert scene.given() == [[1]]
    scene.started[1].answer(problem)
    assert scene.turn() == [problem]


def test_a_retired_worker_gets_no_more_calls_and_ends_after_those_it_has() -> None:
    scene = ready_scene(concurrency=2)
    scene.add(1, 2, 3)
    scene.turn()
    first = scene.started[0]
    first.answer(Problem(1, 0.0, "took longer than 30 s", retires=True))
    assert len(scene.turn()) == 1
    assert len(scene.started) == 2 and not first.closed
    first.answer(done(2))
    assert scene.turn() == [done(2)]
    assert first.closed
    scene.given()
    scene.make_ready()
    assert scene.given() == [[3]]


@pytest.mark.parametrize("concurrency", [0, 8])
def test_a_cancelled_call_is_not_made_again(concurrency: int) -> None:
    scene = ready_scene(concurrency=concurrency)
    scene.add(1, 2, 3, 4)
    scene.group.cancel(3)
    scene.turn()
    assert scene.given() == [[1, 2, 4]]
    scene.group.cancel(2)
    worker = scene.started[0]
    assert worker.sent == ([Cancel(2)] if concurrency else []), "a plain function goes on"
    worker.note, worker.exit = (1, scene.now_s), "ended"
    assert scene.turn() == [lost(1, "ended")]
    scene.make_ready()
    assert scene.given() == [[4]]


def test_a_hook_that_cannot_be_imported_ends_the_run() -> None:
    scene = Scene()
    scene.add(1)
    scene.turn()
    scene.started[0].inbox.append(Ready([], "reward 'x': there is no file x"))
    with pytest.raises(ConfigError, match="there is no file x"):
        scene.turn()


def test_a_process_that_ends_or_hangs_while_it_imports_ends_the_run() -> None:
    scene = Scene()
    scene.add(1)
    scene.turn()
    scene.started[0].exit = "ended its process with exit code 1"
    with pytest.raises(SpmdError, match=r"(?s)exit code 1 while it imported.*its last words"):
        scene.turn()
    late = Scene()
    late.add(1)
    late.turn()
    late.now_s += START_DEADLINE_S + 1
    with pytest.raises(SpmdError, match="were not imported within 600 s"):
        late.turn()
