"""Traces of a run: the spans of all its processes on one time axis, and their export.

`trace.json` is in Chrome's trace format, which Perfetto and chrome://tracing open.

spmd-rl trace RUN [RUN ...]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from spmd_rl.errors import ConfigError, DataError
from spmd_rl.observe.atomic_write import atomic_file

FOLDER = "traces"

_SPAN = tuple[str, int, int, str, dict[str, Any]]


class _Header(msgspec.Struct):
    process: str
    rank: int | None
    host: str
    pid: int
    began_unix_ns: int


@dataclass(frozen=True)
class TracedProcess:
    """A process that recorded a trace, from unix time `began_ns` on. A controller has no rank."""

    name: str
    rank: int | None = None
    host: str = ""
    pid: int = 0
    began_ns: int = 0

    @property
    def order(self) -> tuple[int, str]:
        """Sort key: the controller comes first, then the ranks."""
        return (-1 if self.rank is None else self.rank, self.name)


class Span(NamedTuple):
    """A named interval of a process. Units: `start_ns` is unix time."""

    name: str
    start_ns: int
    length_ns: int
    lane: str
    args: dict[str, Any]

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.length_ns


def trace_files(run: Path) -> dict[Path, TracedProcess]:
    """Return the trace files of a run with the process that wrote each, in their order."""
    files = {path: _first_process(path) for path in (run / FOLDER).glob("*.jsonl")}
    return dict(sorted(files.items(), key=lambda item: item[1].order))


def _first_process(path: Path) -> TracedProcess:
    return next((process for process, _ in read_spans(path)), TracedProcess(path.stem))


def read_spans(path: Path) -> Iterator[tuple[TracedProcess, Span | None]]:
    """Yield a file's spans in the order they ended, each with the process that recorded it.

    The span is None at the header of a process. A line that a dying process cut short is left out.
    Raises: DataError for a line that is neither a header nor a span.
    """
    process = TracedProcess(path.stem)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = msgspec.json.decode(line)
            except (msgspec.DecodeError, RecursionError):
                continue
            try:
                if isinstance(record, dict):
                    header = msgspec.convert(record, _Header)
                    process = TracedProcess(*msgspec.structs.astuple(header))
                    yield process, None
                else:
                    yield process, _span(record, process.began_ns)
            except msgspec.ValidationError:
                raise DataError(
                    f"{path}:{number}", "neither the header nor a span of a trace"
                ) from None


def _span(record: object, began_ns: int) -> Span:
    """Return a span from its line. Raises: ValidationError when it is none."""
    name, start_ns, length_ns, lane, args = msgspec.convert(record, _SPAN)
    return Span(name, began_ns + start_ns, length_ns, lane, args)


def tracks(spans: Iterable[Span]) -> Iterator[tuple[int, int, Span]]:
    """Yield the spans of one lane by start, each with its track and its depth on that track.

    Viewers demand that the spans of a track nest. Spans that only overlap, such as concurrent
    calls, go on different tracks.
    """
    open_ends: list[list[int]] = []  # of each track, when its open spans end, outermost first
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.length_ns)):
        track = next(
            (number for number, ends in enumerate(open_ends) if _fits(span, ends)), len(open_ends)
        )
        if track == len(open_ends):
            open_ends.append([])
        open_ends[track].append(span.end_ns)
        yield track, len(open_ends[track]) - 1, span


def _fits(span: Span, open_ends: list[int]) -> bool:
    """Whether a track takes `span`, which starts no earlier than the track's last span.

    Spans that have ended by then are removed from `open_ends`.
    """
    while open_ends and open_ends[-1] <= span.start_ns:
        open_ends.pop()
    return not open_ends or span.end_ns <= open_ends[-1]


def write_chrome(run: Path) -> int:
    """Write `trace.json`, and return its number of spans.

    Raises: ConfigError when the run has no trace.
    """
    files = trace_files(run)
    if not files:
        raise ConfigError(f"{run / FOLDER} holds no trace: the run must have run.trace = true")
    began_ns = min(process.began_ns for process in files.values())
    with atomic_file(run / "trace.json") as out:
        out.write(
            b'{"displayTimeUnit": "ms", "otherData": {"began_unix_s": %.6f}, "traceEvents": [\n'
            % (began_ns / 1e9)
        )
        num_spans = _write_events(out, files, began_ns)
        out.write(b"\n]}\n")
    return num_spans


def _write_events(out: BinaryIO, files: dict[Path, TracedProcess], began_ns: int) -> int:
    """Write the events of all processes, with commas between, and return the number of spans."""
    num_spans = 0
    for number, (path, process) in enumerate(files.items(), 1):
        events = list(_events(path, process, number, began_ns))
        num_spans += sum(event["ph"] == "X" for event in events)
        out.write((b",\n" if number > 1 else b"") + b",\n".join(map(msgspec.json.encode, events)))
    return num_spans


def _events(
    path: Path, process: TracedProcess, number: int, began_ns: int
) -> Iterator[dict[str, Any]]:
    """Yield one process as Chrome's events: its name, then its spans, lane by lane."""
    yield from _process_events(process, number)
    thread_of: dict[tuple[str, int], int] = {}
    for lane, spans in _spans_by_lane(path).items():
        for track, _, span in tracks(spans):
            if (lane, track) not in thread_of:
                thread = thread_of[lane, track] = len(thread_of) + 1
                yield _thread_event(number, thread, lane, track)
            yield _span_event(number, thread_of[lane, track], span, began_ns)


def _process_events(process: TracedProcess, number: int) -> Iterator[dict[str, Any]]:
    """Yield the events that title a process and give it its place."""
    title = process.name + (f" on {process.host}" if process.host else "")
    yield _metadata(number, 0, "process_name", {"name": title})
    yield _metadata(number, 0, "process_sort_index", {"sort_index": number})


def _thread_event(process: int, thread: int, lane: str, track: int) -> dict[str, Any]:
    """Return the event that names a thread after its lane. Later tracks are numbered from 2."""
    name = lane if track == 0 else f"{lane} ({track + 1})"
    return _metadata(process, thread, "thread_name", {"name": name})


def _spans_by_lane(path: Path) -> dict[str, list[Span]]:
    lanes: dict[str, list[Span]] = {}
    for _, span in read_spans(path):
        if span is not None:
            lanes.setdefault(span.lane, []).append(span)
    return lanes


def _span_event(process: int, thread: int, span: Span, began_ns: int) -> dict[str, Any]:
    """Return a span as a complete event of Chrome's format."""
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "name": span.name,
        "cat": str(span.args.get("phase") or "span"),
        "ts": (span.start_ns - began_ns) / 1e3,
        "dur": span.length_ns / 1e3,
        "args": span.args,
    }


def _metadata(process: int, thread: int, event: str, args: dict[str, Any]) -> dict[str, Any]:
    """Return a metadata event of Chrome's format."""
    return {"ph": "M", "pid": process, "tid": thread, "name": event, "args": args}
