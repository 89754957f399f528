"""Benchmark processes, one a contender, that run laps on request, so that they can take turns.

The driver starts each contender with `Peer`. The contender calls `Laps.lap()` at the top of its
loop. They exchange JSON lines over a Unix socket that is named in the environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

SOCKET_ENV = "BENCHMARK_SOCKET"
START_S = 300.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Peer:
    """The driver's side of one contender, with all processes that it starts."""

    def __init__(
        self, command: list[str], env: dict[str, str], log: Path, cwd: Path | None = None
    ) -> None:
        """Start the contender, in the folder `cwd`.

        Blocks: until it has connected. Raises: RuntimeError with its output if it does not.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        path = str(Path(self._folder.name) / "s")
        self._log = log
        with socket.socket(socket.AF_UNIX) as listener, log.open("w") as output:
            listener.bind(path)
            listener.listen()
            listener.settimeout(1.0)
            self._process = subprocess.Popen(
                command,
                env=os.environ | env | {SOCKET_ENV: path},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )
            self._socket = self._accepted(listener)
        self._lines = self._socket.makefile("r")

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request, and return the reply with `cpu_s`, the processor time used meanwhile.

        Blocks: until the contender replies. Raises: RuntimeError with its output if it ends first.
        """
        before = cpu_seconds(self._process.pid)
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        line = self._lines.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended:\n{self._log.read_text()[-4000:]}")
        return json.loads(line) | {"cpu_s": cpu_seconds(self._process.pid) - before}

    def close(self) -> None:
        """End every process of the contender."""
        members = [*descendants(self._process.pid), self._process.pid]
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._lines.close()
        self._socket.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _accepted(self, listener: socket.socket) -> socket.socket:
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                return listener.accept()[0]
            except TimeoutError:
                continue
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()
        raise RuntimeError(f"{self._process.args} did not report:\n{self._log.read_text()[-4000:]}")


class Laps:
    """The contender's side. The driver requests `laps`, and the reply has their `seconds`."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ[SOCKET_ENV])
        self._lines = self._socket.makefile("r")
        self._left = 0
        self._seconds: list[float] = []
        self._began = 0.0

    def lap(self, **facts: Any) -> None:
        """End the last lap and start the next. `facts` about the last one go into the reply.

        Blocks: for the driver, between requests. Raises: SystemExit when the driver is gone.
        """
        if self._left:
            self._seconds.append(time.perf_counter() - self._began)
            self._left -= 1
            if not self._left:
                self.reply(seconds=self._seconds, **facts)
        if not self._left:
            self._left, self._seconds = int(self.request()["laps"]), []
        self._began = time.perf_counter()

    def request(self) -> dict[str, Any]:
        """Return the driver's next request. Raises: SystemExit when the driver is gone."""
        line = self._lines.readline()
        if not line:
            raise SystemExit
        return json.loads(line)

    def reply(self, **reply: Any) -> None:
        self._socket.sendall(json.dumps(reply).encode() + b"\n")


def descendants(pid: int) -> list[int]:
    """Return the descendants of a process."""
    parents = {child: fields[1] for child, fields in _stats()}
    found: list[int] = []
    for child in parents:
        ancestor = parents[child]
        while ancestor in parents and ancestor != pid:
            ancestor = parents[ancestor]
        if ancestor == pid:
            found.append(child)
    return found


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and its living descendants."""
    members = {pid, *descendants(pid)}
    return (
        sum(fields[11] + fields[12] for child, fields in _stats() if child in members) / TICKS_PER_S
    )


def _stats() -> Iterator[tuple[int, list[int]]]:
    """Yield each process with the fields of /proc/PID/stat after the name; the state is 0."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        yield int(path.parent.name), [0, *map(int, fields[1:13])]
