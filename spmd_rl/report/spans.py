"""Timeline on the report page: the spans of every process in some of the run's steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spmd_rl.errors import DataError
from spmd_rl.observe.jsonl import parse_finite_json
from spmd_rl.observe.timeline import Span, TracedProcess, read_spans, trace_files, tracks
from spmd_rl.report.samples import coarse_to_fine_order, evenly_spaced

MAX_STEPS = 24
MAX_SPANS = 20_000

RecordedSpan = tuple[TracedProcess, Span]


def read_timeline(
    run: Path, max_steps: int = MAX_STEPS, max_spans: int = MAX_SPANS
) -> dict[str, Any]:
    """Return steps with their spans, evenly spaced over the run, as many as fit.

    A step with too many spans keeps its longest ones.
    """
    windows = _windows(run)
    chosen = [windows[i] for i in evenly_spaced(list(range(len(windows))), max_steps)]
    per_step = _spans_per_step(run, chosen)
    names: dict[str, int] = {}
    steps: list[dict[str, Any]] = []
    num_left = max_spans
    for i in coarse_to_fine_order(len(chosen)):
        spans = sorted(per_step[i], key=lambda item: -item[1].length_ns)[:max_spans]
        if len(spans) <= num_left or not steps:
            num_left -= len(spans)
            entry = {"order": i, "num_left_out": len(per_step[i]) - len(spans)}
            steps.append(entry | _step(chosen[i], spans, names))
    return {
        "steps": sorted(steps, key=lambda step: step["order"]),
        "num_steps": len(windows),
        "names": list(names),
    }


def _spans_per_step(run: Path, steps: list[Span]) -> list[list[RecordedSpan]]:
    """Return for each step the spans that overlap it."""
    per_step: list[list[RecordedSpan]] = [[] for _ in steps]
    starts = [step.start_ns for step in steps]
    for process, span in _recorded(run):
        first = max(0, bisect_right(starts, span.start_ns) - 1)
        for i in range(first, bisect_right(starts, span.end_ns)):
            if span.start_ns < steps[i].end_ns and span.end_ns > steps[i].start_ns:
                per_step[i].append((process, span))
    return per_step


def _recorded(run: Path) -> Iterator[RecordedSpan]:
    """Yield the run's spans, from the files of its processes or else from trace.json.

    Raises: DataError when the file is damaged.
    """
    files = trace_files(run)
    for path in files:
        yield from ((process, span) for process, span in read_spans(path) if span is not None)
    chrome = run / "trace.json"
    if not files and chrome.is_file():
        try:
            yield from list(_from_chrome(parse_finite_json(str(chrome), chrome.read_bytes())))
        except (LookupError, TypeError, ValueError, AttributeError):
            raise DataError(str(chrome), "not a file of spmd-rl trace: remove it") from None


def _from_chrome(trace: dict[str, Any]) -> Iterator[RecordedSpan]:
    """Yield the spans of a trace.json that `spmd-rl trace` wrote."""
    began_ns = round(trace["otherData"]["began_unix_s"] * 1e9)
    titles: dict[tuple[int, int], str] = {}
    for event in trace["traceEvents"]:
        where = event["pid"], event["tid"]
        if event["name"] in ("process_name", "thread_name"):
            titles[where] = str(event["args"]["name"])
        elif event["ph"] == "X":
            process = _process_of_title(titles[event["pid"], 0], event["pid"])
            yield process, _span_of_event(event, titles[where], began_ns)


def _process_of_title(title: str, pid: int) -> TracedProcess:
    name, _, host = title.partition(" on ")
    return TracedProcess(name, pid, host)


def _span_of_event(event: dict[str, Any], lane: str, began_ns: int) -> Span:
    start_ns, length_ns = round(event["ts"] * 1e3), round(event["dur"] * 1e3)
    return Span(str(event["name"]), began_ns + start_ns, length_ns, lane, dict(event["args"]))


def _windows(run: Path) -> list[Span]:
    """Return the spans called "step", by time; one span over the whole trace if there are none.

    A step that was repeated after a restart counts as it was last done.
    """
    steps: dict[int, Span] = {}
    first_ns, last_ns = 2**63, 0
    for _, span in _recorded(run):
        first_ns, last_ns = min(first_ns, span.start_ns), max(last_ns, span.end_ns)
        number = span.args.get("step")
        if span.name == "step" and isinstance(number, int):
            steps[number] = max(span, steps.get(number, span), key=lambda step: step.start_ns)
    if not steps and last_ns:
        return [Span("all", first_ns, last_ns - first_ns, "", {})]
    return sorted(steps.values(), key=lambda step: step.start_ns)


def _step(step: Span, spans: list[RecordedSpan], names: dict[str, int]) -> dict[str, Any]:
    """Return the lanes of one step, with those of a main thread first in their process."""
    lanes = _by_lane(spans)
    order = sorted(lanes, key=lambda key: (key[0].order, key[1] != "MainThread", key[1]))
    return {
        "step": step.args.get("step"),
        "length_us": round(step.length_ns / 1e3, 1),
        "lanes": [
            {"process": process.name, "host": process.host, "lane": lane}
            | _drawn_spans(lanes[process, lane], step.start_ns, names)
            for process, lane in order
        ],
    }


def _by_lane(spans: list[RecordedSpan]) -> dict[tuple[TracedProcess, str], list[Span]]:
    lanes: dict[tuple[TracedProcess, str], list[Span]] = {}
    for process, span in spans:
        lanes.setdefault((process, span.lane), []).append(span)
    return lanes


def _drawn_spans(spans: list[Span], start_ns: int, names: dict[str, int]) -> dict[str, Any]:
    """Return the spans of one lane and the number of their rows.

    A span becomes [row in its lane, start in us, length in us, index of its name, arguments].
    """
    rows = _rows(spans)
    return {
        "num_rows": 1 + max(row for row, _ in rows),
        "spans": [
            [
                row,
                round((span.start_ns - start_ns) / 1e3, 1),
                round(span.length_ns / 1e3, 1),
                names.setdefault(span.name, len(names)),
                span.args,
            ]
            for row, span in rows
        ],
    }


def _rows(spans: list[Span]) -> list[tuple[int, Span]]:
    """Return each span of a lane with its row. A track has one row a depth, below other tracks."""
    placed = list(tracks(spans))
    depths: dict[int, int] = {}
    for track, depth, _ in placed:
        depths[track] = max(depths.get(track, 0), depth + 1)
    offset = {track: sum(depths[other] for other in depths if other < track) for track in depths}
    return [(offset[track] + depth, span) for track, depth, span in placed]
