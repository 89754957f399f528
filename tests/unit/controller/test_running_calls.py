"""The order in which commands start, and calls that answer later."""

from __future__ import annotations

import random

import pytest

from spmd_rl.controller.deferred import Deferred
from spmd_rl.controller.running_calls import DeferredCall, RunningCalls

Command = tuple[str, int]


def is_concurrent(command: Command) -> bool:
    return command[0] == "concurrent"


class Rank:
    """Starts commands; each is answered when the test says so."""

    def __init__(self) -> None:
        self.calls = RunningCalls[Command](is_concurrent)
        self.started: list[int] = []
        self.answered: list[int] = []
        self.aborted: list[int] = []
        self.open: dict[int, Deferred[int]] = {}

    def run_ready(self) -> None:
        for _, number in self.calls.ready():
            self.started.append(number)
            deferred = Deferred[int](lambda number=number: self.aborted.append(number))
            self.open[number] = deferred
            self.calls.defer(
                DeferredCall("role", number, deferred, lambda _, n=number: self.answered.append(n))
            )

    def answer(self, number: int) -> None:
        self.open.pop(number).resolve(number)
        self.run_ready()


@pytest.mark.parametrize("seed", range(20))
def test_commands_start_in_order_and_alone_unless_they_are_concurrent(seed: int) -> None:
    rng, rank = random.Random(seed), Rank()
    kinds = {number: rng.choice(["concurrent", "serial"]) for number in range(40)}
    unsent = list(kinds.items())
    while unsent or rank.open:
        if unsent and rng.random() < 0.5:
            number, kind = unsent.pop(0)
            rank.calls.add((kind, number))
            rank.run_ready()
        elif rank.open:
            rank.answer(rng.choice(list(rank.open)))
        serial = [number for number in rank.open if kinds[number] == "serial"]
        assert not serial or serial[0] == min(rank.open), "it started while others were open"
    assert rank.started == list(kinds)
    assert sorted(rank.answered) == list(kinds)
    assert rank.calls.num_unanswered == 0


def test_a_command_that_waits_holds_back_those_after_it() -> None:
    rank = Rank()
    for command in (("concurrent", 1), ("serial", 2), ("concurrent", 3)):
        rank.calls.add(command)
    rank.run_ready()
    assert rank.started == [1]
    rank.answer(1)
    assert rank.started == [1, 2, 3]


def test_an_abort_reaches_a_call_that_runs_and_one_that_waits() -> None:
    rank = Rank()
    for command in (("concurrent", 1), ("serial", 2)):
        rank.calls.add(command)
    rank.run_ready()
    rank.calls.abort(1)
    rank.calls.abort(2)
    assert rank.aborted == [1]
    rank.answer(1)
    assert rank.aborted == [1, 2]
    rank.answer(2)
    rank.calls.abort(2)
    assert rank.aborted == [1, 2]


def test_an_abort_that_comes_after_the_answer_is_forgotten() -> None:
    rank = Rank()
    rank.calls.add(("concurrent", 1))
    rank.run_ready()
    rank.answer(1)
    rank.calls.add(("concurrent", 2))
    rank.calls.abort(1)
    rank.run_ready()
    assert (rank.started, rank.aborted) == ([1, 2], [])
    assert not rank.calls._aborted


def test_an_abort_leaves_alone_a_call_whose_answer_is_held() -> None:
    rank = Rank()
    rank.calls.holds_answers = True
    rank.calls.add(("concurrent", 1))
    rank.run_ready()
    rank.answer(1)
    rank.calls.abort(1)
    assert rank.aborted == []
    rank.calls.release([1])
    assert rank.calls.num_unanswered == 0


def test_an_error_answers_all_calls_of_its_role() -> None:
    rank = Rank()
    rank.calls.add(("concurrent", 1))
    rank.calls.add(("concurrent", 2))
    rank.run_ready()
    rank.calls.fail("other", ValueError("not this role"))
    assert rank.answered == []
    error = ValueError("of this role")
    rank.calls.fail("role", error)
    assert rank.answered == [1, 2]
    assert all(deferred.error is error for deferred in rank.open.values())


def test_a_call_is_answered_once() -> None:
    deferred = Deferred[int]()
    deferred.resolve(1)
    with pytest.raises(RuntimeError, match="only once"):
        deferred.fail(ValueError())
    seen = []
    deferred.call_when_answered(lambda: seen.append(deferred.value))
    assert seen == [1]
