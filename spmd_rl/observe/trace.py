"""Trace of one process: named spans, kept in memory and appended to a file of the process.

    trace = Trace(run_folder / "traces", "rank 3", rank=3)
    with trace.span("trainer.train_step", role="trainer", phase="train", step=7):
        ...
    trace.flush()  # at a time when no other process waits for this one

The file is `traces/<process>.jsonl`. Every start of the process appends one object, its header:

    {"process": "rank 3", "rank": 3, "host": "node1", "pid": 4711,
     "began_unix_ns": 1700000000000000000}

Then it appends one array a span:

    ["trainer.train_step", 1200300, 95000000, "MainThread", {"role": "trainer", "step": 7}]

of name, start in ns since `began_unix_ns`, length in ns, lane and arguments. A lane is a thread, or
anything else that does one thing at a time. Spans are timed on the monotonic clock. The header ties
that clock to unix time, so all processes share one time axis, as far as their hosts' clocks agree.
`timeline.py` reads these files.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import warnings
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from spmd_rl.observe.atomic_write import open_append

CAPACITY = 4096  # spans in memory; writing that many takes a few milliseconds

now_ns = time.monotonic_ns

_TimedSpan = tuple[str, int, int, str, dict[str, Any]]  # as in a line of the file

_NO_SPAN: AbstractContextManager[None] = nullcontext()


class _ThreadName(threading.local):
    """The name of the current thread, looked up once a thread."""

    def __init__(self) -> None:
        self.lane = threading.current_thread().name


_THREAD_NAME = _ThreadName()


class Trace:
    """Recorder of one process's spans, from any of its threads. Without a folder it is off.

    At most `capacity` spans wait in memory; the span that reaches it writes them all. If the disk
    is full, recording ends with a warning and the run goes on.
    """

    def __init__(
        self,
        folder: Path | None = None,
        process: str = "",
        *,
        rank: int | None = None,
        capacity: int = CAPACITY,
    ) -> None:
        self._spans: deque[_TimedSpan] = deque()
        self._capacity = capacity
        self._flushing = threading.Lock()
        self._encoder = msgspec.json.Encoder(enc_hook=str)
        self._began_ns = now_ns()
        self._flushed_ns = 0
        self._path = None if folder is None else folder / f"{process.replace(' ', '_')}.jsonl"
        self.on = folder is not None
        self._file: BinaryIO | None = None
        self._header = _header(process, rank, self._began_ns)

    def span(self, name: str, **args: Any) -> AbstractContextManager[None]:
        """Record the body of a `with` as a span, on the lane of its thread."""
        return _NO_SPAN if self._path is None else _OpenSpan(self, name, args)

    def add(self, name: str, start_ns: int, end_ns: int, lane: str = "", **args: Any) -> None:
        """Record a span between two readings of `now_ns`.

        This is for spans that no `with` can hold, such as calls in flight.
        """
        if self._path is not None:
            self._append(name, start_ns, end_ns, lane or _THREAD_NAME.lane, args)

    def flush(self, every_s: float = 0.0) -> None:
        """Append the recorded spans to the file, unless that was done less than `every_s` ago."""
        if now_ns() - self._flushed_ns < every_s * 1e9:
            return
        with self._flushing:
            self._flushed_ns = now_ns()
            spans = [self._spans.popleft() for _ in range(len(self._spans))]
            if self._path is None or not spans:
                return
            try:
                file = self._file or self._open_file(self._path)
                file.write(self._encoder.encode_lines(spans))
            except OSError as error:
                self._stop()
                warnings.warn(f"tracing stops here: {error}", stacklevel=2)

    def close(self) -> None:
        """Write the remaining spans, and record no more."""
        self.flush()
        self._stop()

    def _append(
        self, name: str, start_ns: int, end_ns: int, lane: str, args: dict[str, Any]
    ) -> None:
        self._spans.append((name, start_ns - self._began_ns, end_ns - start_ns, lane, args))
        if len(self._spans) >= self._capacity:
            self.flush()

    def _open_file(self, path: Path) -> BinaryIO:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = self._file = open_append(path, buffering=0)
        # the newline ends a line that an earlier process died in
        file.write((b"\n" if file.tell() else b"") + self._encoder.encode(self._header) + b"\n")
        return file

    def _stop(self) -> None:
        self._path, self.on = None, False
        if self._file is not None:
            self._file.close()
            self._file = None


class _OpenSpan(AbstractContextManager[None]):
    __slots__ = ("_args", "_name", "_start_ns", "_trace")

    def __init__(self, trace: Trace, name: str, args: dict[str, Any]) -> None:
        self._trace = trace
        self._name = name
        self._args = args

    def __enter__(self) -> None:
        self._start_ns = now_ns()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._trace._append(self._name, self._start_ns, now_ns(), _THREAD_NAME.lane, self._args)


def _header(process: str, rank: int | None, began_ns: int) -> dict[str, Any]:
    """Return the header of this process, which began to record at the reading `began_ns`."""
    return {
        "process": process,
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "began_unix_ns": began_ns + unix_offset_ns(),
    }


def unix_offset_ns(num_readings: int = 5) -> int:
    """Return what to add to `now_ns` to get unix time.

    It is taken from the reading of both clocks that took the least time.
    """
    readings = []
    for _ in range(num_readings):
        before, unix_ns, after = now_ns(), time.time_ns(), now_ns()
        readings.append((after - before, unix_ns - (before + after) // 2))
    return min(readings)[1]
