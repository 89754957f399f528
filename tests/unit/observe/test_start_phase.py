"""What a start says that it is busy with."""

from __future__ import annotations

import queue
import sys
import threading

import pytest

from spmd_rl.observe import start_phase as module
from spmd_rl.observe.start_phase import start_phase

LONG_S = 3600.0


def test_a_terminal_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with start_phase("importing torch", LONG_S):
        assert capsys.readouterr().err == "importing torch ...\n"


def test_a_log_is_told_only_of_what_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(module, "_say", said.put)
    with start_phase("importing torch", LONG_S):
        pass
    with start_phase("building train", 0.0):
        assert said.get(timeout=60) == "building train"
    assert said.empty()


def test_no_thread_is_left_for_a_fork() -> None:
    before = threading.active_count()
    with start_phase("importing torch", LONG_S):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
