"""Decisions of a crew, with processes and a clock of the test."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from spmd_rl.errors import ConfigError, SpmdError
from spmd_rl.hooks.rank.crew import AHEAD_S, HELD_S, START_DEADLINE_S, Crew, Hands, Limits, Place
from spmd_rl.hooks.wire.answer_ring import Rewards
from spmd_rl.hooks.wire.messages import (
    Answered,
    NotReady,
    Problem,
    Ready,
    Result,
    ToProcess,
    ToRank,
)
from spmd_rl.hooks.wire.running_note import Running

DEADLINE_S = 30.0


@dataclass(eq=False)
class FakeProcess:
    """A process that does what the test says."""

    inbox: deque[ToRank] = field(default_factory=deque)
    note: Running | None = None
    exit: str | None = None
    garbled: bool = False
    tail: str = "its last words"
    has_unread_output: bool = False
    closed: bool = False
    ring: list[int] = field(default_factory=list)  # calls
    num_taken: int = 0

    def send(self, message: ToProcess) -> None:
        raise AssertionError("the crew's hands send")

    def receive(self) -> list[ToRank]:
        messages = list(self.inbox)
        self.inbox.clear()
        return messages

    @property
    def num_answers(self) -> int:
        return len(self.ring)

    def take_answers(self, until: int | None = None) -> Rewards:
        taken = self.ring[self.num_taken : until]
        self.num_taken += len(taken)
        return rewarded(*taken)

    def running(self) -> Running | None:
        return self.note

    def exit_sentence(self) -> str | None:
        return self.exit

    def close(self) -> None:
        self.closed = True


def rewarded(*call_ids: int) -> Rewards:
    return Rewards(list(call_ids), [1e-5] * len(call_ids), [0.5] * len(call_ids))


class Scene:
    """A crew, its processes and a clock."""

    def __init__(self, *, processes: int = 1, slots: int = 0, deadline_s: float = DEADLINE_S):
        self.now_s = 100.0
        self.started: list[FakeProcess] = []
        self.sent: list[tuple[FakeProcess, list[int]]] = []
        self.cancelled: list[int] = []
        hands = Hands(self._start, lambda place, ready: None, self._send, self._cancel)
        self.crew = Crew(Limits(processes, slots, deadline_s), hands)

    def _start(self) -> FakeProcess:
        self.started.append(FakeProcess())
        return self.started[-1]

    def _send(self, place: Place, call_ids: list[int]) -> None:
        assert isinstance(place.member, FakeProcess)
        self.sent.append((place.member, call_ids))

    def _cancel(self, place: Place, call_id: int) -> None:
        self.cancelled.append(call_id)

    def add(self, *call_ids: int) -> None:
        self.crew.add(call_ids)

    def turn(self) -> list[Any]:
        """Read and send; return what calls have sent."""
        news = [one for one in self.started if one.inbox or one.exit or one.garbled]
        found = self.crew.read(self.now_s, news)
        self.crew.dispatch(self.now_s)
        return found

    def make_ready(self) -> None:
        for process in self.started:
            if not process.closed:
                process.inbox.append(Ready([]))
        self.turn()

    def calls_sent(self) -> list[list[int]]:
        found, self.sent = [calls for _, calls in self.sent], []
        return found


def done(call_id: int, seconds: float = 1e-5) -> Result:
    return Result(call_id, seconds, [], {})


def lost(call_id: int, problem: str) -> Problem:
    """What is told of a call whose process ended, or was ended, before it had answered."""
    return Problem(call_id, 0.0, problem, unanswered=True)


def answered(*call_ids: int, seconds: float = 1e-5) -> list[ToRank]:
    return [done(call_id, seconds) for call_id in call_ids]


def ready_scene(**limits: Any) -> Scene:
    """A scene with one process that has answered two calls quickly."""
    scene = Scene(**limits)
    scene.add(-2, -1)
    scene.turn()
    scene.make_ready()
    scene.started[0].inbox.extend(answered(-2))
    scene.turn()
    scene.started[0].inbox.extend(answered(-1))
    scene.turn()
    scene.calls_sent()
    return scene


def test_a_process_is_started_for_the_first_call_and_gets_it_once_it_is_ready() -> None:
    scene = Scene(processes=2)
    scene.turn()
    assert scene.started == []
    scene.add(1, 2, 3, 4, 5)
    scene.turn()
    assert len(scene.started) == 1 and scene.calls_sent() == []
    scene.make_ready()
    assert scene.calls_sent() == [[1]], "the time of a call is not known yet"
    scene.started[0].inbox.extend(answered(1, seconds=60))
    assert scene.turn() == answered(1, seconds=60)
    assert scene.calls_sent() == [[2]], "the first call does not count"
    scene.started[0].inbox.extend(answered(2))
    scene.turn()
    assert scene.calls_sent() == [[3, 4, 5]]


def test_calls_are_sent_ahead_for_a_short_time_only() -> None:
    scene = ready_scene()
    scene.add(1)
    scene.turn()
    scene.started[0].inbox.extend(answered(1, seconds=AHEAD_S))
    scene.turn()
    scene.calls_sent()
    scene.add(*range(2, 50))
    scene.turn()
    ((sent),) = scene.calls_sent()
    assert 1 <= len(sent) < 15, "a tenth of AHEAD_S a call in the mean"


def test_another_process_is_started_only_if_the_work_that_waits_is_long() -> None:
    scene = ready_scene(processes=2)
    scene.add(*range(1, 500))
    scene.turn()
    assert len(scene.started) == 1, "each of them takes 10 us"
    slow = Scene(processes=2)
    slow.add(1, 2, 3)
    slow.turn()
    slow.make_ready()
    slow.started[0].note = Running(1, slow.now_s)
    slow.turn()
    assert len(slow.started) == 1
    slow.now_s += 2 * AHEAD_S
    slow.turn()
    assert len(slow.started) == 1, "the next call may be quick"
    slow.now_s += 2 * AHEAD_S
    slow.turn()
    assert len(slow.started) == 2
    slow.now_s += 2 * AHEAD_S
    slow.turn()
    slow.now_s += 2 * AHEAD_S
    slow.turn()
    assert len(slow.started) == 2, "the bound is two"


def test_a_slow_first_call_asks_for_no_other_process() -> None:
    """It may have imported something, or a busy machine has kept it from running."""
    scene = Scene(processes=2)
    scene.add(*range(200))
    scene.turn()
    scene.make_ready()
    scene.started[0].inbox.extend(answered(0, seconds=1.0))
    scene.turn()
    scene.now_s += 0.01
    scene.turn()
    assert scene.calls_sent() == [[0], [1]]
    scene.started[0].inbox.extend(answered(1))
    scene.turn()
    scene.now_s += 2 * AHEAD_S
    scene.turn()
    assert len(scene.started) == 1


def test_waiting_calls_are_spread_over_the_processes() -> None:
    scene = ready_scene(processes=2)
    scene.crew.start(scene.now_s)
    scene.make_ready()
    scene.add(*range(1, 8))
    scene.turn()
    assert sorted(map(len, scene.calls_sent())) == [3, 4]


def test_a_death_is_the_fault_of_the_call_that_ran() -> None:
    scene = ready_scene()
    scene.add(1, 2, 3)
    scene.turn()
    assert scene.calls_sent() == [[1, 2, 3]]
    process = scene.started[0]
    process.inbox.extend(answered(1))
    process.note, process.exit = Running(2, scene.now_s), "ended its process with SIGSEGV"
    assert scene.turn() == [*answered(1), lost(2, "ended its process with SIGSEGV")]
    assert process.closed and len(scene.started) == 2
    scene.make_ready()
    assert scene.calls_sent() == [[3]], "it has not run before, and is not suspected"


def test_without_blame_each_call_is_made_alone_in_a_process() -> None:
    scene = ready_scene(slots=8)
    scene.add(1, 2, 3)
    scene.turn()
    scene.started[0].exit = "ended its process with SIGKILL"
    assert scene.turn() == []
    scene.calls_sent()
    scene.add(4)
    scene.make_ready()
    assert scene.calls_sent() == [[1]]
    scene.started[1].inbox.extend(answered(1))
    scene.turn()
    assert scene.calls_sent() == [[2]]
    # in this process another call has run before, which may have left something behind
    scene.started[1].exit = "ended its process with SIGKILL"
    assert scene.turn() == []
    scene.make_ready()
    assert scene.calls_sent() == [[3]]
    scene.started[2].exit = "ended its process with SIGKILL"
    assert scene.turn() == [lost(3, "ended its process with SIGKILL")]
    scene.make_ready()
    assert scene.calls_sent() == [[2]]
    scene.started[3].inbox.extend(answered(2))
    assert scene.turn() == answered(2)
    assert scene.calls_sent() == [[4]]


def test_a_thread_that_may_have_crashed_leaves_nobody_to_blame() -> None:
    scene = ready_scene(slots=8)
    scene.add(1, 2)
    scene.turn()
    scene.calls_sent()
    process = scene.started[0]
    process.note, process.exit = Running(1, scene.now_s, beside_threads=True), "ended"
    assert scene.turn() == []
    scene.make_ready()
    assert scene.calls_sent() == [[1]]


def test_a_call_that_runs_for_too_long_ends_its_process() -> None:
    scene = ready_scene()
    scene.add(1, 2)
    scene.turn()
    process = scene.started[0]
    process.note = Running(1, scene.now_s)
    scene.now_s += DEADLINE_S
    assert scene.turn() == [] and not process.closed
    scene.now_s += 0.1
    assert scene.turn() == [lost(1, "took longer than 30 s")]
    assert process.closed


def test_a_call_that_answers_just_before_it_is_ended_is_not_late() -> None:
    """Its answer is in the socket, though nothing was said of it."""
    scene = ready_scene()
    scene.add(1)
    scene.turn()
    process = scene.started[0]

    class Finishing(FakeProcess):
        def receive(self) -> list[ToRank]:
            self.note = None
            return answered(1)

    process.__class__ = Finishing
    process.note = Running(1, scene.now_s)
    scene.now_s += DEADLINE_S + 1
    assert scene.crew.read(scene.now_s, []) == answered(1)
    assert not process.closed


def test_without_a_deadline_a_call_may_take_as_long_as_it_likes() -> None:
    scene = ready_scene(deadline_s=0)
    scene.add(1)
    scene.turn()
    scene.started[0].note = Running(1, scene.now_s)
    scene.now_s += 1e6
    assert scene.turn() == []


def test_what_a_call_left_running_blames_no_other() -> None:
    """A step of call 1, which is answered, ends the process of call 2."""
    scene = ready_scene(slots=8)
    scene.add(1, 2)
    scene.turn()
    process = scene.started[0]
    process.inbox.extend(answered(1))
    process.note, process.exit = Running(1, scene.now_s), "ended"
    assert scene.turn() == answered(1)
    scene.add(3)
    scene.calls_sent()
    scene.make_ready()
    assert scene.calls_sent() == [[2, 3]], "both at once: nobody is suspected"


@pytest.mark.parametrize(("slots", "blamed"), [(0, [1]), (8, [])])
def test_garbage_in_the_socket_is_that_of_the_only_plain_call(
    slots: int, blamed: list[int]
) -> None:
    scene = ready_scene(slots=slots)
    scene.add(1)
    scene.turn()
    scene.started[0].garbled = True
    assert [problem.call_id for problem in scene.turn()] == blamed


def test_garbage_of_one_of_several_calls_makes_each_of_them_alone() -> None:
    """An answer in the ring, of which the rank was not told, may be that of the culprit."""
    scene = ready_scene()
    scene.add(1, 2)
    scene.turn()
    scene.calls_sent()
    scene.started[0].ring = [1]
    scene.started[0].garbled = True
    assert scene.turn() == []
    scene.make_ready()
    assert scene.calls_sent() == [[1]]
    scene.started[1].inbox.extend(answered(1))
    assert scene.turn() == answered(1)
    assert scene.calls_sent() == [[2]]
    scene.started[1].garbled = True
    assert [problem.call_id for problem in scene.turn()] == [2]


def test_garbage_that_came_while_the_ring_was_looked_into_is_not_missed() -> None:
    """The answer of a slow call is in the ring only once what it wrote is in the socket."""
    scene = ready_scene()
    scene.add(1)
    scene.turn()
    process = scene.started[0]

    class Writing(FakeProcess):
        def receive(self) -> list[ToRank]:
            self.garbled, self.ring = True, [1]
            return []

    process.__class__ = Writing
    process.note = Running(1, scene.now_s)
    scene.now_s += 2 * HELD_S
    found = scene.crew.read(scene.now_s, [])
    assert found == [lost(1, "wrote into the socket of its process")]


def test_an_answer_that_comes_while_the_socket_is_read_waits_for_the_next_look() -> None:
    scene = ready_scene()
    scene.add(1)
    scene.turn()
    process = scene.started[0]

    class Answering(FakeProcess):
        def receive(self) -> list[ToRank]:
            self.ring = [1]
            return []

    process.__class__ = Answering
    process.note = Running(1, scene.now_s)
    scene.now_s += 2 * HELD_S
    assert scene.crew.read(scene.now_s, []) == []
    scene.now_s += 2 * HELD_S
    assert scene.crew.read(scene.now_s, []) == [rewarded(1)]


def test_answers_in_the_ring_are_taken_when_the_process_tells_of_them() -> None:
    scene = ready_scene()
    scene.add(1, 2, 3)
    scene.turn()
    process = scene.started[0]
    process.ring = [1, 2, 3]
    assert scene.turn() == []
    process.inbox.append(Answered(2))
    assert scene.turn() == [rewarded(1, 2)]
    process.inbox.append(Answered(3))
    assert scene.turn() == [rewarded(3)]
    process.inbox.append(Answered(3))
    assert scene.turn() == []


def test_a_call_that_ends_its_process_does_not_take_the_answers_before_it_along() -> None:
    scene = ready_scene()
    scene.add(1, 2, 3)
    scene.turn()
    process = scene.started[0]
    process.ring = [1]
    process.note, process.exit = Running(2, scene.now_s), "ended its process with SIGSEGV"
    assert scene.turn() == [rewarded(1), lost(2, "ended its process with SIGSEGV")]
    scene.calls_sent()
    scene.make_ready()
    assert scene.calls_sent() == [[3]]


def test_a_slow_call_does_not_hold_back_the_answers_before_it() -> None:
    scene = ready_scene()
    scene.add(1, 2)
    scene.turn()
    process = scene.started[0]
    process.ring, process.note = [1], Running(2, scene.now_s)
    assert scene.turn() == []
    scene.now_s += 2 * HELD_S
    assert scene.turn() == [rewarded(1)]
    scene.now_s += DEADLINE_S
    assert scene.turn() == [lost(2, "took longer than 30 s")]


def test_a_problem_in_doubt_is_looked_at_again_in_a_fresh_process() -> None:
    scene = ready_scene()
    scene.add(1, 2)
    scene.turn()
    problem = Problem(1, 0.0, "raised OSError", in_doubt=True, spoiled=True)
    scene.started[0].inbox.append(problem)
    scene.started[0].exit = "ended its process with exit code 0"
    assert scene.turn() == []
    scene.calls_sent()
    scene.make_ready()
    assert scene.calls_sent() == [[1]]
    scene.started[1].inbox.append(problem)
    assert scene.turn() == [problem]


def test_a_spoiled_process_gets_no_more_calls_and_ends_after_those_it_has() -> None:
    scene = ready_scene(slots=2)
    scene.add(1, 2, 3)
    scene.turn()
    first = scene.started[0]
    first.inbox.append(Problem(1, 0.0, "took longer than 30 s", spoiled=True))
    assert len(scene.turn()) == 1
    assert len(scene.started) == 2 and not first.closed
    first.inbox.extend(answered(2))
    assert scene.turn() == answered(2)
    assert first.closed
    scene.calls_sent()
    scene.make_ready()
    assert scene.calls_sent() == [[3]]


def test_a_dropped_call_is_not_made_again() -> None:
    scene = ready_scene()
    scene.add(1, 2, 3, 4)
    scene.crew.drop(3)
    scene.turn()
    assert scene.calls_sent() == [[1, 2, 4]]
    scene.crew.drop(2)
    assert scene.cancelled == [2]
    process = scene.started[0]
    process.note, process.exit = Running(1, scene.now_s), "ended"
    assert scene.turn() == [lost(1, "ended")]
    scene.make_ready()
    assert scene.calls_sent() == [[4]]


def test_a_hook_that_cannot_be_imported_ends_the_run() -> None:
    scene = Scene()
    scene.add(1)
    scene.turn()
    scene.started[0].inbox.append(NotReady("reward 'x': there is no file x"))
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


def test_output_that_was_left_is_read_without_news() -> None:
    scene = ready_scene()
    process = scene.started[0]
    process.has_unread_output = True
    process.inbox.extend(answered())
    scene.add(1)
    scene.turn()
    process.inbox.extend(answered(1))
    assert scene.crew.read(scene.now_s, []) == answered(1)
