"""A driver tells its contenders when to run, and is told how long each lap took."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.peer import Peer, cpu_seconds, descendants

ROOT = Path(__file__).parents[3]
ENV = {"PYTHONPATH": str(ROOT)}
COUNTS = """\
from benchmarks.peer import Laps
laps, n = Laps(), 0
while True:
    laps.lap(n=n)
    n += 1
"""
WORKS = COUNTS.replace("    n += 1\n", "    n += 1\n    sum(range(3_000_000))\n")


def command(script: str) -> list[str]:
    return [sys.executable, "-c", script]


def test_laps_are_run_when_asked_for(tmp_path: Path) -> None:
    with Peer(command(COUNTS), ENV, tmp_path / "log") as peer:
        first, second = peer.ask(laps=2), peer.ask(laps=3)
    assert (first["n"], len(first["seconds"])) == (2, 2)
    assert (second["n"], len(second["seconds"])) == (5, 3)


def test_processor_time_is_counted_and_everything_ends(tmp_path: Path) -> None:
    before = set(descendants(os.getpid()))
    with Peer(command(WORKS), ENV, tmp_path / "log") as peer:
        reply = peer.ask(laps=3)
        started = set(descendants(os.getpid())) - before
        assert started
    assert reply["cpu_s"] > 0
    assert not started & set(descendants(os.getpid()))
    assert cpu_seconds(os.getpid()) > 0


def test_a_contender_that_ends_is_shown(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no such module") as raised:
        Peer(command("raise SystemExit('no such module')"), ENV, tmp_path / "log")
    assert "did not report" in str(raised.value)
    ends = "from benchmarks.peer import Laps\nLaps().request()\nraise SystemExit('out of memory')"
    with (
        Peer(command(ends), ENV, tmp_path / "log") as peer,
        pytest.raises(RuntimeError, match="out of memory"),
    ):
        peer.ask(laps=1)
