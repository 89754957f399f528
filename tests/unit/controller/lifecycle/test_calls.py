"""Open calls: answers, failures, and what ends a wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from spmd_rl.controller.channel.messages import Failure
from spmd_rl.controller.lifecycle.calls import OpenCalls
from spmd_rl.errors import LostRankError

ANSWER = b"x", b""


def open_calls() -> OpenCalls:
    """Return calls of a router that waits for other threads: there is nothing to handle here."""

    def handle_until(done: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not done() and time.monotonic() < end:
            threading.Event().wait(0.001)
        return done()

    return OpenCalls(SimpleNamespace(handle_until=handle_until), 10.0)  # type: ignore[arg-type]


def test_a_wait_ends_when_every_rank_has_answered() -> None:
    calls = open_calls()
    record = calls.open("actor.go", (0, 1))
    assert calls.record_answer(record.number, 0, ANSWER)
    assert not calls.wait(record, 0.0)
    assert record.unanswered == [1]
    threading.Thread(target=calls.record_answer, args=(record.number, 1, ANSWER)).start()
    assert calls.wait(record, 10.0)


def test_an_answer_is_there_before_the_wait_for_it_ends() -> None:
    class Watched(set[int]):
        def remove(self, rank: int) -> None:
            assert rank in record.answers or record.failure is not None
            super().remove(rank)

    calls = open_calls()
    record = calls.open("actor.go", (0, 1))
    record.waiting = Watched(record.waiting)
    assert calls.record_answer(record.number, 0, ANSWER)
    assert calls.record_failure(record.number, 1, Failure("KeyError", "'x'", "", 1))
    assert record.unanswered == []


def test_a_wait_ends_at_the_first_failure() -> None:
    calls = open_calls()
    record = calls.open("actor.go", (0, 1))
    failure = Failure("KeyError", "'x'", "", 1)
    calls.record_failure(record.number, 1, failure)
    assert calls.wait(record, 10.0)
    assert record.failure == (1, failure)


def test_a_long_wait_leaves_time_for_other_work_once() -> None:
    calls, moments = open_calls(), []
    record = calls.open("actor.go", (0,))

    def meanwhile() -> None:
        moments.append(calls.oldest_unanswered(0))
        calls.record_answer(record.number, 0, ANSWER)

    calls.on_long_wait = meanwhile
    assert calls.wait(record, 10.0)
    assert moments == [record]


def test_a_wait_that_is_short_does_nothing_else() -> None:
    calls, moments = open_calls(), []
    calls.on_long_wait = lambda: moments.append(1)
    record = calls.open("actor.go", (0,))
    calls.record_answer(record.number, 0, ANSWER)
    assert calls.wait(record, 10.0)
    assert not moments


def test_answers_nobody_asked_for_are_refused() -> None:
    calls = open_calls()
    record = calls.open("actor.go", (0,))
    assert not calls.record_answer(record.number, 1, ANSWER)
    assert not calls.record_answer(record.number + 1, 0, ANSWER)
    assert calls.record_answer(record.number, 0, ANSWER)
    assert not calls.record_answer(record.number, 0, ANSWER)
    calls.close(record)
    assert not calls.record_answer(record.number, 0, ANSWER)


def test_a_cause_ends_all_waits_and_the_first_stands() -> None:
    calls = open_calls()
    record = calls.open("actor.go", (0,))
    first = LostRankError("rank 0")
    threading.Thread(target=calls.abort, args=(first,)).start()
    with pytest.raises(LostRankError, match="rank 0"):
        calls.wait(record, 10.0)
    calls.abort(LostRankError("rank 1"))
    with pytest.raises(LostRankError, match="rank 0"):
        calls.open("actor.more", (0,))


def test_who_owes_what() -> None:
    calls = open_calls()
    calls.phase = "rollout"
    first, second = calls.open("a.go", (0, 1)), calls.open("b.go", (1,))
    calls.record_answer(first.number, 0, ANSWER)
    assert (calls.num_unanswered(0), calls.num_unanswered(1)) == (0, 2)
    assert calls.oldest_unanswered(0) is None
    assert calls.oldest_unanswered(1) is first
    assert second.phase == "rollout"


def test_a_listener_is_told_once_of_all_that_ends_a_call() -> None:
    calls, told = open_calls(), []
    record = calls.open("actor.go", (0, 1))
    record.call_when_done(lambda: told.append("early"))
    for rank in record.ranks:
        calls.record_failure(record.number, rank, Failure("KeyError", "'x'", "", 1))
    calls.abort(LostRankError("rank 1"))
    record.call_when_done(lambda: told.append("late"))
    assert told == ["early", "late"]
