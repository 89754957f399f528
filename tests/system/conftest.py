"""Fixtures of the system tests: a Slurm cluster, and the socket by which its jobs reach a test."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.system.cluster import Cluster, missing_programs

NODES = ("n1", "n2", "n3")
CONNECT_S = 900.0  # for a submitted run to be scheduled, to start on all nodes, and to connect


@dataclass
class WaitingRun:
    """A run that has connected: its report, and the connection on which it waits."""

    report: dict[str, Any]
    connection: socket.socket

    def order(self, word: str) -> None:
        """Send an order: `end`, `fail` or `go on`."""
        self.connection.sendall(word.encode())
        self.connection.close()


class ReportSocket:
    """The socket that the witness recipe connects to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        self._server.settimeout(1.0)
        self._sockets: list[socket.socket] = [self._server]

    def next_run(self, job_ended: Callable[[], bool]) -> WaitingRun:
        """Wait for the next run to connect, and return it.

        Blocks: for `CONNECT_S` at most, or until `job_ended()`. Raises: TimeoutError then.
        """
        give_up_at = time.monotonic() + CONNECT_S
        while True:
            try:
                connection, _ = self._server.accept()
                break
            except TimeoutError:
                if time.monotonic() > give_up_at or job_ended():
                    raise
        connection.settimeout(CONNECT_S)
        self._sockets.append(connection)
        with connection.makefile("r") as text:
            return WaitingRun(json.loads(text.readline()), connection)

    def close(self) -> None:
        for each in self._sockets:
            each.close()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    missing = missing_programs()
    if missing and os.environ.get("CI"):
        pytest.fail(f"{', '.join(missing)} not installed: run tests/system/install.sh")
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: run tests/system/install.sh")
    ours = Cluster(NODES)
    try:
        ours.start()
        yield ours
    finally:
        ours.stop()


@pytest.fixture
def report_socket(cluster: Cluster) -> Iterator[ReportSocket]:
    path = cluster.folder / "report_socket"
    opened = ReportSocket(path)
    yield opened
    opened.close()
    path.unlink()
