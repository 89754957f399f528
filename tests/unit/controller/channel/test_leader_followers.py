"""Leader/followers over one pipe: each byte is handled once, by a thread that waits for it."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Iterator

import pytest

from spmd_rl.controller.channel import leader_followers
from spmd_rl.controller.channel.leader_followers import LeaderFollowers, WakeupFd

WAIT_S = 100.0


class Pipe:
    """A pipe to poll; it records which thread handled what."""

    def __init__(self) -> None:
        self.wakeup = WakeupFd()
        self.handled: list[tuple[str, bytes]] = []
        self.outbox: deque[str] = deque()
        self.sent: list[str] = []
        self.busy = threading.Lock()
        self._out, self._in = os.pipe()

    def handle(self, seconds: float) -> None:
        assert self.busy.acquire(blocking=False), "two threads handle at once"
        self.flush()
        ready, _, _ = select.select([self._out, self.wakeup.fileno()], [], [], seconds)
        if self._out in ready:
            self.handled.append((threading.current_thread().name, os.read(self._out, 1)))
        self.wakeup.drain()
        self.flush()
        self.busy.release()

    def flush(self) -> None:
        while self.outbox:
            self.sent.append(self.outbox.popleft())

    def send(self, byte: bytes) -> None:
        os.write(self._in, byte)

    def close(self) -> None:
        self.wakeup.close()
        os.close(self._out)
        os.close(self._in)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


@pytest.fixture
def leader(pipe: Pipe) -> Iterator[LeaderFollowers]:
    leader = LeaderFollowers(pipe.handle, pipe.wakeup, "background")
    leader.start()
    yield leader
    leader.close()


def test_a_waiting_thread_handles_what_arrives_itself(pipe: Pipe) -> None:
    me = threading.current_thread().name
    # on a busy machine the background thread would handle some
    leader = LeaderFollowers(pipe.handle, pipe.wakeup, "not started")
    for count in range(20):
        threading.Timer(0.01, pipe.send, [b"x"]).start()
        assert leader.handle_until(lambda count=count: len(pipe.handled) > count, WAIT_S)  # type: ignore[misc]
    assert {name for name, _ in pipe.handled} == {me}


def test_the_background_thread_handles_it_while_nobody_waits(
    pipe: Pipe, leader: LeaderFollowers
) -> None:
    pipe.send(b"x")
    end = time.monotonic() + WAIT_S
    while not pipe.handled and time.monotonic() < end:
        threading.Event().wait(0.01)
    assert pipe.handled == [("background", b"x")]


def test_a_wait_ends_in_time(leader: LeaderFollowers) -> None:
    began = time.monotonic()
    assert not leader.handle_until(lambda: False, 0.05)
    assert 0.05 <= time.monotonic() - began < WAIT_S


def test_two_threads_may_wait_for_different_things(pipe: Pipe, leader: LeaderFollowers) -> None:
    found: list[bytes] = []

    def wait_for(byte: bytes) -> None:
        if leader.handle_until(lambda: any(seen == byte for _, seen in pipe.handled), WAIT_S):
            found.append(byte)

    waiting = [threading.Thread(target=wait_for, args=[byte]) for byte in (b"a", b"b", b"c")]
    for thread in waiting:
        thread.start()
    for byte in (b"c", b"b", b"a"):
        pipe.send(byte)
    for thread in waiting:
        thread.join(WAIT_S)
    assert sorted(found) == [b"a", b"b", b"c"]


def test_a_turn_may_be_taken_to_wait_in_another_way(pipe: Pipe, leader: LeaderFollowers) -> None:
    assert leader.lead(WAIT_S)
    pipe.send(b"x")
    assert not pipe.busy.locked(), "two threads handle at once"
    threading.Event().wait(2 * leader_followers.IDLE_S)
    assert leader.handle_due
    assert not pipe.handled, "the background has to wait"
    leader.resign()
    assert leader.handle_until(lambda: pipe.handled, WAIT_S)


def test_what_is_queued_wakes_who_waits(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_followers, "TICK_S", WAIT_S)
    leader = LeaderFollowers(pipe.handle, pipe.wakeup, "not started")
    sent = threading.Event()
    waiting = threading.Thread(target=leader.handle_until, args=[lambda: bool(pipe.sent), WAIT_S])
    waiting.start()
    while not pipe.busy.locked():
        sent.wait(0.001)
    began = time.monotonic()
    pipe.outbox.append("letter")
    leader.run_or_wake(pipe.flush)
    assert leader.handle_due, "who waits in another way is told as well"
    waiting.join(WAIT_S)
    assert pipe.sent == ["letter"]
    assert time.monotonic() - began < WAIT_S / 2, "it need not wait for the tick"


def test_what_is_queued_while_nobody_waits_is_done_at_once(pipe: Pipe) -> None:
    leader = LeaderFollowers(pipe.handle, pipe.wakeup, "not started")
    pipe.outbox.append("letter")
    leader.run_or_wake(pipe.flush)
    assert pipe.sent == ["letter"]


def test_a_follower_is_woken_by_its_answer_and_by_the_end_of_the_lead(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither waits for the tick: b's answer comes while a leads, and c's after a has ended."""
    monkeypatch.setattr(leader_followers, "TICK_S", WAIT_S)
    leader = LeaderFollowers(pipe.handle, pipe.wakeup, "not started")
    began, ended = time.monotonic(), {byte: threading.Event() for byte in (b"a", b"b", b"c")}

    def wait_for(byte: bytes) -> None:
        leader.handle_until(lambda: any(seen == byte for _, seen in pipe.handled), WAIT_S)
        ended[byte].set()

    waiting = [threading.Thread(target=wait_for, args=[byte], name=byte.decode()) for byte in ended]
    waiting[0].start()
    while not pipe.busy.locked():
        time.sleep(0)
    for thread in waiting[1:]:
        thread.start()
    while len(leader._followers) < 2:
        time.sleep(0)
    for byte in (b"b", b"a", b"c"):
        pipe.send(byte)
        assert ended[byte].wait(WAIT_S / 2)
    for thread in waiting:
        thread.join(WAIT_S)
    assert pipe.handled[:2] == [("a", b"b"), ("a", b"a")]
    assert pipe.handled[2] == ("c", b"c")
    assert time.monotonic() - began < WAIT_S / 2
