"""The queue of waiting requests against a list that is sorted anew each time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.waiting_queue import WaitingQueue

SAMPLING = SamplingConfig()


def request(uid: int, priority: int) -> Request:
    return Request(uid, 0, np.array([1], np.int32), SAMPLING, priority=priority)


@given(st.lists(st.tuples(st.sampled_from(["append", "left", "pop", "halve"]), st.integers(0, 5))))
def test_requests_leave_by_priority_and_then_in_order(moves: list[tuple[str, int]]) -> None:
    queue = WaitingQueue()
    held: list[Request] = []
    for uid, (move, priority) in enumerate(moves):
        one = request(uid, priority)
        if move == "append":
            queue.append(one)
            held.append(one)
        elif move == "left":
            queue.appendleft(one)
            held.insert(0, one)
        elif move == "halve":
            held = sorted(held, key=lambda each: each.priority)[::2]
            queue.replace(held)
        elif held:
            held.sort(key=lambda each: each.priority)
            assert queue.first is held[0]
            assert queue.popleft() is held.pop(0)
        expected = sorted(held, key=lambda each: each.priority)
        assert [each.uid for each in queue] == [each.uid for each in expected]
        assert len(queue) == len(held)


def test_an_empty_queue_has_no_first() -> None:
    with pytest.raises(ValueError, match="no request waits"):
        WaitingQueue().popleft()
