"""Processes of one run, found by a mark in their environment, whatever their parent is."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path

MARK = "SPMD_RL_TEST_MARK"
CALLED = b"\0-m\0spmd_rl\0run\0"


def with_mark(mark: str) -> list[int]:
    """Return the live processes of the run with this mark, oldest first; zombies are not alive."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if (
                    wanted in (folder / "environ").read_bytes().split(b"\0")
                    and state(int(folder.name)) != "Z"
                ):
                    found.append(int(folder.name))
            except OSError:  # it has ended, or belongs to another user
                continue
    return sorted(found)


def controller(mark: str) -> int | None:
    """Return the controller of a run; None before it starts."""
    commands = {pid: _read(pid, "cmdline") for pid in with_mark(mark)}
    return next(
        (pid for pid, command in commands.items() if b"\0spmd_rl\0controller\0" in command), None
    )


def ranks(mark: str, launcher: int) -> list[int]:
    """Return the workers that a launcher started, in the order of their ranks.

    `spmd-rl` forks them; torchrun starts them as new commands.
    """
    commands = {pid: _read(pid, "cmdline") for pid in with_mark(mark) if parent(pid) == launcher}
    return [
        pid
        for pid, command in commands.items()
        if command == _read(launcher, "cmdline") or CALLED in command
    ]


def parent(pid: int) -> int:
    stat = _read(pid, "stat").rpartition(b")")[2].split()
    return int(stat[1]) if stat else 0


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for_end(mark: str, seconds: float) -> bool:
    """Return whether all processes of a run ended. Blocks: for `seconds` at most."""
    until = time.monotonic() + seconds
    while pids := with_mark(mark):
        left = until - time.monotonic()
        if left <= 0:
            return False
        try:
            descriptor = os.pidfd_open(pids[0])
        except ProcessLookupError:
            continue
        select.select([descriptor], [], [], left)
        os.close(descriptor)
    return True


def kill_all(mark: str) -> None:
    """SIGKILL every process of a run until none is left, whatever its session."""
    while pids := with_mark(mark):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
