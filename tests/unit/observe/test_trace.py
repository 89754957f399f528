"""The recorder: what it writes, what it costs, and what it survives."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from spmd_rl.observe import trace as tracing
from spmd_rl.observe.timeline import Span, read_spans, trace_files, write_chrome
from spmd_rl.observe.trace import Trace, now_ns, unix_offset_ns


def spans_of(folder: Path) -> list[Span]:
    return [
        span for path in folder.glob("*.jsonl") for _, span in read_spans(path) if span is not None
    ]


def test_a_span_says_what_when_and_where(tmp_path: Path) -> None:
    trace = Trace(tmp_path, "rank 3", rank=3)
    before = time.time_ns()
    with (
        trace.span("trainer.train_step", role="trainer", phase="train", step=7),
        trace.span("forward"),
    ):
        pass
    after = time.time_ns()
    trace.close()
    inner, outer = spans_of(tmp_path)
    assert (outer.name, outer.lane) == ("trainer.train_step", "MainThread")
    assert outer.args == {"role": "trainer", "phase": "train", "step": 7}
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns
    slack_ns = 5_000_000  # the unix clock may be slewed against the monotonic one while we look
    assert before - slack_ns <= outer.start_ns <= outer.end_ns <= after + slack_ns


def test_a_span_that_raises_is_recorded_and_raises(tmp_path: Path) -> None:
    trace = Trace(tmp_path, "rank 0", rank=0)
    with pytest.raises(ZeroDivisionError), trace.span("bad"):
        _ = 1 / 0
    trace.close()
    assert [span.name for span in spans_of(tmp_path)] == ["bad"]


def test_calls_in_flight_are_added_from_two_readings_of_the_clock(tmp_path: Path) -> None:
    trace = Trace(tmp_path, "controller")
    start = now_ns()
    trace.add("rollout.generate", start, start + 1500, lane="calls", role="rollout")
    trace.close()
    [span] = spans_of(tmp_path)
    assert (span.lane, span.length_ns, span.args) == ("calls", 1500, {"role": "rollout"})


def test_each_thread_is_a_lane_and_no_span_is_lost_between_them(tmp_path: Path) -> None:
    trace = Trace(tmp_path, "rank 0", rank=0, capacity=16)

    def work() -> None:
        for i in range(500):
            with trace.span("work", i=i):
                pass

    threads = [threading.Thread(target=work, name=f"worker-{i}") for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.close()
    seen = [(span.lane, span.args["i"]) for span in spans_of(tmp_path)]
    assert sorted(seen) == sorted((f"worker-{t}", i) for t in range(4) for i in range(500))


def test_memory_is_bounded(tmp_path: Path) -> None:
    trace = Trace(tmp_path, "rank 0", rank=0, capacity=100)
    for _ in range(1000):
        with trace.span("x"):
            pass
        assert len(trace._spans) < 100
    trace.close()
    assert len(spans_of(tmp_path)) == 1000


def test_off_it_writes_nothing(tmp_path: Path) -> None:
    trace = Trace()
    with trace.span("x", a=1):
        pass
    trace.add("y", 0, 1)
    trace.flush()
    trace.close()
    assert not trace.on
    assert list(tmp_path.iterdir()) == []


def test_there_is_no_file_before_there_is_something_to_write(tmp_path: Path) -> None:
    Trace(tmp_path / "traces", "controller").close()
    assert list(tmp_path.iterdir()) == []


def test_arguments_json_does_not_know_become_text(tmp_path: Path) -> None:
    trace = Trace(tmp_path, "rank 0", rank=0)
    with trace.span("x", path=Path("a/b"), kind=ValueError("odd")):
        pass
    trace.close()
    assert spans_of(tmp_path)[0].args == {"path": "a/b", "kind": "odd"}


def test_a_restart_goes_on_in_the_file_after_a_line_cut_short(tmp_path: Path) -> None:
    first = Trace(tmp_path, "rank 0", rank=0)
    with first.span("before"):
        pass
    first.close()
    [path] = trace_files_of(tmp_path)
    path.write_bytes(path.read_bytes() + b'["half a sp')
    second = Trace(tmp_path, "rank 0", rank=0)
    with second.span("after"):
        pass
    second.close()
    assert [span.name for span in spans_of(tmp_path)] == ["before", "after"]


def trace_files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl"))


def test_a_full_disk_ends_the_recording_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr("os.open", lambda *_: full)
    trace = Trace(tmp_path, "rank 0", rank=0)
    with trace.span("x"):
        pass
    with pytest.warns(UserWarning, match="tracing stops here: .*No space left"):
        trace.flush()
    with trace.span("y"):
        pass
    trace.close()
    assert not trace.on


def test_processes_started_at_different_times_share_one_axis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    early, instant = Trace(tmp_path / "traces", "controller"), now_ns()
    monkeypatch.setattr(
        tracing, "now_ns", lambda: time.monotonic_ns() + 50_000_000_000
    )  # a host with another boot time
    late = Trace(tmp_path / "traces", "rank 0", rank=0)
    early.add("same instant", instant, instant + 10)
    late.add("same instant", instant + 50_000_000_000, instant + 50_000_000_010)
    early.close()
    late.close()
    write_chrome(tmp_path)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    a, b = [event["ts"] for event in events if event["ph"] == "X"]
    assert abs(a - b) < 2_000  # us: both clocks were read against the unix clock
    assert [process.name for process in trace_files(tmp_path).values()] == ["controller", "rank 0"]


def test_the_clock_is_read_against_unix_time_closely() -> None:
    offsets = [unix_offset_ns() for _ in range(5)]
    assert max(offsets) - min(offsets) < 50_000_000


def test_a_span_costs_a_few_microseconds(tmp_path: Path) -> None:
    """Includes writing. The quietest of many short rounds counts, as the machine may be busy."""
    trace, num_spans, best_s = Trace(tmp_path, "rank 0", rank=0), 5000, 1.0
    for _ in range(200):
        began = time.process_time()
        for step in range(num_spans):
            with trace.span("trainer.train_step", role="trainer", step=step):
                pass
        best_s = min(best_s, (time.process_time() - began) / num_spans)
        if best_s < 4e-6:
            break
    trace.close()
    assert best_s < 4e-6
