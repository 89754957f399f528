"""Reading what processes recorded, and the trace.json made of it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.errors import ConfigError, DataError
from spmd_rl.observe.command import main
from spmd_rl.observe.timeline import Span, read_spans, tracks, write_chrome
from tests.unit.report.synthetic import make_run, write_trace


def check_chrome(trace: Any) -> None:
    """The rules of the Trace Event Format's JSON object form that viewers rely on, for the events
    we write.
    """
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    named_processes, named_threads = set(), set()
    per_thread: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        # 0 is the idle process to Perfetto
        assert isinstance(event["pid"], int) and event["pid"] > 0
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
            if event["name"] == "process_name":
                named_processes.add(event["pid"])
            if event["name"] == "thread_name":
                named_threads.add((event["pid"], event["tid"]))
            continue
        assert event["ph"] == "X"
        assert isinstance(event["ts"], (int, float)) and event["ts"] >= 0
        assert isinstance(event["dur"], (int, float)) and event["dur"] >= 0
        assert isinstance(event["cat"], str)
        per_thread.setdefault((event["pid"], event["tid"]), []).append(
            (event["ts"], event["ts"] + event["dur"])
        )
    assert {pid for pid, _ in per_thread} <= named_processes
    assert set(per_thread) == named_threads
    for spans in per_thread.values():
        check_nesting(spans)


def check_nesting(spans: list[tuple[float, float]]) -> None:
    """No two spans of one thread overlap without one holding the other."""
    open_ends: list[float] = []
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ends and open_ends[-1] <= start + 1e-6:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + 1e-6, (
            f"{start} to {end} leaves the span around it"
        )
        open_ends.append(end)


def test_the_checks_can_fail() -> None:
    check_nesting([(0, 10), (2, 5), (5, 9), (10, 12)])
    with pytest.raises(AssertionError, match="leaves the span"):
        check_nesting([(0, 10), (5, 12)])


def test_a_run_becomes_a_trace_that_viewers_accept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "demo", num_steps=5, num_ranks=2)
    assert main([str(run)]) == 0
    trace = json.loads((run / "trace.json").read_text())
    check_chrome(trace)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 5 * (1 + 6 + 2 * 9)
    assert f"{len(spans):,} spans" in capsys.readouterr().out
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["controller on node1", "rank 0 on node1", "rank 1 on node1"]
    train = next(
        event
        for event in spans
        if event["name"] == "trainer.train_step" and event["args"].get("role")
    )
    assert (train["cat"], train["args"]) == ("train", {"phase": "train", "role": "trainer"})
    assert min(event["ts"] for event in spans) == 0


def test_more_than_nine_ranks_come_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_trace(tmp_path / "run", range(1, 2), 12, random.Random(0))
    write_chrome(tmp_path / "run")
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    names = [
        event["args"]["name"].partition(" on ")[0]
        for event in events
        if event["name"] == "process_name"
    ]
    assert names == ["controller", *(f"rank {rank}" for rank in range(12))]


def overlapping(name: str, start: int, end: int) -> list[Any]:
    return [name, start, end - start, "calls", {}]


def test_calls_that_overlap_go_on_threads_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    head = {"process": "controller", "rank": None, "host": "h", "pid": 1, "began_unix_ns": 5}
    calls = [overlapping("a", 0, 1000), overlapping("b", 500, 1500), overlapping("c", 1000, 2000)]
    (tmp_path / "traces" / "controller.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [head, *calls])
    )
    write_chrome(tmp_path)
    trace = json.loads((tmp_path / "trace.json").read_text())
    check_chrome(trace)
    thread_of = {
        event["name"]: event["tid"] for event in trace["traceEvents"] if event["ph"] == "X"
    }
    assert thread_of == {"a": 1, "b": 2, "c": 1}


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=25))
def test_on_a_track_spans_lie_within_or_beside_one_another(
    intervals: list[tuple[int, int]],
) -> None:
    spans = [Span(str(i), start, length, "x", {}) for i, (start, length) in enumerate(intervals)]
    placed = list(tracks(spans))
    assert sorted(span.name for _, _, span in placed) == sorted(span.name for span in spans)
    for track in {track for track, _, _ in placed}:
        mine = [(depth, span) for at, depth, span in placed if at == track]
        check_nesting([(span.start_ns, span.end_ns) for _, span in mine])
        for depth, span in mine:  # two spans at one depth never overlap
            others = [s for d, s in mine if d == depth and s is not span]
            assert all(s.end_ns <= span.start_ns or span.end_ns <= s.start_ns for s in others)


def test_a_line_that_is_no_span_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.jsonl"
    path.write_text(
        '{"process": "rank 0", "rank": 0, "host": "h", "pid": 1, "began_unix_ns": 0}\n["x", 1]\n'
    )
    with pytest.raises(DataError, match=r"rank_0\.jsonl:2: neither the header nor a span"):
        list(read_spans(path))


def test_a_run_without_a_trace_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no trace: the run must have"):
        write_chrome(tmp_path)
    assert not list(tmp_path.glob("*.part"))
    with pytest.raises(ConfigError, match="no run folder at"):
        main([str(tmp_path / "nowhere")])


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert "spmd-rl trace RUN" in capsys.readouterr().out
