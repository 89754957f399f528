"""Times of requests: stages, lanes of the trace, and means."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spmd_rl.observe import request_times
from spmd_rl.observe.request_times import RequestTimes, request_metrics, stages_of
from spmd_rl.observe.trace import Trace

SECOND = 10**9


class Clock:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def wait(self, seconds: int) -> None:
        self.now += seconds * SECOND


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(request_times, "now_ns", clock)
    return clock


class Spans(Trace):
    """A trace that keeps its spans as (name, lane, start, end, arguments), in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.on = True
        self.found: list[tuple[Any, ...]] = []

    def add(self, name: str, start_ns: int, end_ns: int, lane: str = "", **args: Any) -> None:
        self.found.append((name, lane, start_ns / SECOND, end_ns / SECOND, args))


def drawn(*keys: tuple[int, int]) -> tuple[Any, Any]:
    """The uids and indices of tokens."""
    uids, indices = zip(*keys, strict=True)
    return np.array(uids), np.array(indices)


def pass_through(times: RequestTimes, clock: Clock, key: tuple[int, int]) -> dict[str, float]:
    """One request: a second in the queue, two of prefill, three of decoding, four of grading."""
    times.submit(key)
    clock.wait(1)
    began_ns = clock.now
    clock.wait(2)
    times.mark_step(began_ns, [key, (key[0], 5)], *drawn(key))
    clock.wait(3)
    times.mark_step(clock.now, [], *drawn(key))  # its later tokens
    times.mark("drawn", key)
    clock.wait(4)
    times.mark("graded", key)
    clock.wait(1)
    times.mark("graded", key)  # told twice
    return times.finish(key)


def test_stages_of_a_request(clock: Clock) -> None:
    spans = Spans()
    times = RequestTimes(spans)
    found = pass_through(times, clock, (7, 2))
    assert found == {"started": 1, "first_token": 3, "drawn": 6, "graded": 10}
    assert stages_of(found) == {"queue": 1, "prefill": 2, "decode": 3, "grading": 4}
    assert [(name, start, end) for name, _, start, end, _ in spans.found] == [
        ("queue", 0, 1),
        ("prefill", 1, 3),
        ("decode", 3, 6),
        ("grading", 6, 10),
    ]
    assert {(lane, *args.items()) for _, lane, _, _, args in spans.found} == {
        ("request 1", ("prompt", 7), ("first_sample", 2))
    }
    assert len(times) == 0
    assert times.finish((7, 2)) == {}


def test_an_event_that_nobody_tells_is_part_of_the_next_stage(clock: Clock) -> None:
    times = RequestTimes(Spans())
    times.submit((0, 0))
    clock.wait(2)
    times.mark("drawn", (0, 0))
    times.mark("drawn", (0, 1))  # nobody knows this one
    found = times.finish((0, 0))
    assert stages_of(found) == {"decode": 2}
    assert stages_of({}) == {}


def test_a_trace_that_is_off_costs_nothing() -> None:
    times = RequestTimes(Trace())
    times.submit((0, 0))
    assert len(times) == 0
    assert times.finish((0, 0)) == {}


def test_a_lane_is_given_on_and_its_spans_never_overlap(clock: Clock) -> None:
    """With one lane: the second request has none, the third waited while the first was drawn."""
    spans = Spans()
    times = RequestTimes(spans, num_lanes=1)
    keys = [(uid, 0) for uid in range(3)]
    for key in keys:
        times.submit(key)
    for uid in (0, 1):
        times.mark("started", keys[uid])
    clock.wait(5)
    for uid in (0, 1):
        times.mark("drawn", keys[uid])
    times.finish(keys[0])
    times.mark("started", keys[2])
    clock.wait(2)
    times.mark("drawn", keys[2])
    found = [times.finish(key) for key in keys[1:]]
    assert [one["drawn"] for one in found] == [5, 7], "times do not depend on lanes"
    assert [(args["prompt"], name, start, end) for name, _, start, end, args in spans.found] == [
        (0, "queue", 0, 0),
        (0, "decode", 0, 5),
        (2, "queue", 5, 5),
        (2, "decode", 5, 7),
    ]


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["submit", "started", "tokens", "drawn", "graded", "finish", "forget"]),
        st.integers(0, 5),
    ),
    max_size=60,
)


@given(MOVES, st.integers(1, 3))
@example([("submit", 5), ("drawn", 5), ("started", 5), ("finish", 5)], 1)
def test_whatever_happens_lanes_do_not_overlap_and_nothing_is_left(
    moves: list[tuple[str, int]], num_lanes: int
) -> None:
    clock, spans = Clock(), Spans()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_times, "now_ns", clock)
        times = RequestTimes(spans, num_lanes=num_lanes)
        for move, uid in moves:
            clock.wait(1)
            key = (uid, 0)
            does: dict[str, Callable[[], object]] = {
                "submit": lambda key=key: times.forget(key) or times.submit(key),
                "tokens": lambda key=key: times.mark_step(clock.now, [key], *drawn(key)),
                "finish": lambda key=key: times.finish(key),
                "forget": lambda key=key: times.forget(key),
            }
            does.get(move, lambda move=move, key=key: times.mark(move, key))()  # type: ignore[misc]
        for uid in range(6):
            times.forget((uid, 0))
    assert len(times) == 0
    by_lane: dict[str, list[tuple[float, float]]] = {}
    for _, lane, start, end, _ in spans.found:
        by_lane.setdefault(lane, []).append((start, end))
    assert len(by_lane) <= num_lanes
    assert all(start <= end for found in by_lane.values() for start, end in found)
    for found in by_lane.values():
        assert all(first[1] <= second[0] for first, second in pairwise(sorted(found)))


def test_means_are_over_the_requests_that_know_a_stage() -> None:
    metadata = [
        {},
        {"times": {"started": 1.0, "first_token": 2.0, "drawn": 4.0, "graded": 9.0}},
        {"times": {"first_token": 3.0, "drawn": 10.0}, "error": "slow"},
    ]
    assert request_metrics(metadata) == {
        "time/queue_mean": 1.0,
        "time/prefill_mean": 2.0,
        "time/decode_mean": 4.5,
        "time/grading_mean": 5.0,
        "time/request_max": 10.0,
    }
    assert request_metrics([{}, {"times": {}}]) == {}


def test_lanes_are_in_the_file_of_the_process(tmp_path: Path) -> None:
    trace = Trace(tmp_path, "rank 3", rank=3)
    times = RequestTimes(trace)
    times.submit((7, 0))
    times.mark("started", (7, 0))
    times.mark("drawn", (7, 0))
    times.finish((7, 0))
    trace.close()
    _, *spans = map(json.loads, (tmp_path / "rank_3.jsonl").read_text().splitlines())
    assert [(name, lane) for name, _, _, lane, _ in spans] == [
        ("queue", "request 1"),
        ("decode", "request 1"),
    ]


def test_what_agents_take_is_neither_queue_nor_grading(clock: Clock) -> None:
    times, key = RequestTimes(Spans()), (5, 0)
    times.submit(key)
    clock.wait(3)
    times.mark_asked(key)
    clock.wait(1)
    times.mark("started", key)
    clock.wait(2)
    times.mark("first_token", key)
    for seconds in (1, 2):
        clock.wait(seconds)
        times.mark_turn(5)
    clock.wait(4)
    times.mark_over(key)
    clock.wait(5)
    times.mark("graded", key)
    stages = stages_of(times.finish(key))
    assert stages == {"agent": 7, "queue": 1, "prefill": 2, "decode": 3, "grading": 5}


def test_an_episode_that_asks_for_no_turn_is_its_agents(clock: Clock) -> None:
    spans = Spans()
    times, key = RequestTimes(spans), (5, 0)
    times.submit(key)
    clock.wait(9)
    times.mark_over(key)
    times.mark("graded", key)
    assert stages_of(times.finish(key)) == {"agent": 9, "decode": 0, "grading": 0}
    assert spans.found[0][:4] == ("agent", "request 1", 0, 9)


def test_turns_of_another_sample_than_the_first_count_too(clock: Clock) -> None:
    """The first sample asks for nothing, so that nobody knows of its queue and prefill."""
    times, key = RequestTimes(Spans()), (5, 0)
    times.submit(key)
    clock.wait(2)
    times.mark_asked((5, 3))
    clock.wait(3)
    times.mark_turn(5)
    clock.wait(4)
    times.mark_over(key)
    assert stages_of(times.finish(key)) == {"agent": 6, "decode": 3}


def test_no_stage_ends_before_it_began(clock: Clock) -> None:
    """A turn of the first sample that is given up may begin after the last one that was drawn."""
    times, key = RequestTimes(Spans()), (5, 0)
    times.submit(key)
    times.mark_asked((5, 3))
    clock.wait(1)
    times.mark_turn(5)
    clock.wait(1)
    times.mark_asked(key)
    times.mark("started", key)
    times.mark("first_token", key)
    times.mark_over(key)
    assert min(stages_of(times.finish(key)).values()) == 0
