"""Calls in the order in which they end."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from spmd_rl.controller.pending import CompletionQueue, Pending, StartedCall, as_completed
from spmd_rl.errors import DeadlineError


class Channel:
    """Ends calls one by one while somebody waits."""

    def __init__(self) -> None:
        self.to_end: list[Call] = []
        self.now_s = 0.0

    def handle_until(self, done: Callable[[], object], seconds: float) -> bool:
        while not done() and self.to_end:
            self.to_end.pop(0).end()
        if not done():
            self.now_s += seconds
        return bool(done())


class Call(StartedCall):
    def __init__(self, channel: Channel, deadline_s: float = 100.0) -> None:
        self.channel = channel
        self.deadline_s = deadline_s
        self.ended = False
        self.listeners: list[Callable[[], object]] = []

    @property
    def done(self) -> bool:
        return self.ended

    @property
    def seconds_left(self) -> float:
        return self.deadline_s - self.channel.now_s

    def end(self) -> None:
        self.ended = True
        for listener in self.listeners:
            listener()

    def call_when_done(self, listener: Callable[[], object]) -> None:
        self.listeners.append(listener)
        if self.ended:
            listener()

    def handle_until(self, done: Callable[[], object], seconds: float) -> bool:
        return self.channel.handle_until(done, seconds)


def pending(call: Call, value: int) -> Pending[int]:
    def finish(deadline_s: float | None) -> int:
        if not call.ended:
            raise DeadlineError(f"call {value} is late")
        return value

    return Pending(finish, call)


@pytest.mark.parametrize("seed", range(5))
def test_calls_come_in_the_order_of_their_end(seed: int) -> None:
    channel = Channel()
    calls = [Call(channel) for _ in range(50)]
    order = random.Random(seed).sample(range(50), 50)
    calls[order[0]].end()  # before anybody asks
    channel.to_end = [calls[number] for number in order[1:]]
    started = [pending(call, number) for number, call in enumerate(calls)]
    assert [ended.wait() for ended in as_completed(started)] == order


def test_a_wait_that_is_too_short_returns_nothing() -> None:
    channel, queue = Channel(), CompletionQueue[int]()
    assert queue.wait() is None
    queue.add(pending(Call(channel), 1))
    assert queue.wait(5.0) is None
    assert channel.now_s == 5.0
    assert len(queue) == 1
    queue.wake()
    assert queue.wait() is None


def test_the_oldest_call_has_the_deadline() -> None:
    channel, queue = Channel(), CompletionQueue[int]()
    queue.add(pending(Call(channel, deadline_s=10.0), 1))
    queue.add(pending(Call(channel, deadline_s=3.0), 2))
    with pytest.raises(DeadlineError, match="call 1 is late"):
        queue.wait()
    assert channel.now_s == 10.0
