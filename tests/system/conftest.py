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
CALL_S = 900.0  # for a submitted run to be scheduled, to start on all nodes, and to connect


@dataclass
class Call:
    """A run that has connected: its report, and the connection on which it waits."""

    report: dict[str, Any]
    line: socket.socket

    def tell(self, order: str) -> None:
        """Send an order, `end` or `fail`."""
        self.line.sendall(order.encode())
        self.line.close()


class Telephone:
    """The socket that the witness recipe connects to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        self._server.settimeout(1.0)
        self._lines: list[socket.socket] = [self._server]

    def answer(self, hopeless: Callable[[], bool]) -> Call:
        """Wait for the next run to connect, and return its call.

        Blocks: for `CALL_S` at most, or until `hopeless`. Raises: TimeoutError then.
        """
        give_up_at = time.monotonic() + CALL_S
        while True:
            try:
                line, _ = self._server.accept()
                break
            except TimeoutError:
                if time.monotonic() > give_up_at or hopeless():
                    raise
        line.settimeout(CALL_S)
        self._lines.append(line)
        with line.makefile("r") as text:
            return Call(json.loads(text.readline()), line)

    def close(self) -> None:
        for line in self._lines:
            line.close()


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
def telephone(cluster: Cluster) -> Iterator[Telephone]:
    path = cluster.folder / "telephone"
    line = Telephone(path)
    yield line
    line.close()
    path.unlink()
