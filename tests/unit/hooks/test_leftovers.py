"""What a hook leaves behind: it harms no other call, and does not outlive the pool."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.controller.lifecycle.process_family import Orphans, is_of_hooks
from spmd_rl.hooks.config import HookConfig
from spmd_rl.hooks.rank.pool import HookPool
from spmd_rl.hooks.rank.tasks import Failed, Graded
from tests.unit.hooks.cases import HERE
from tests.unit.hooks.leaving_functions import LEAVES
from tests.unit.hooks.test_pool import grade_all

FUNCTIONS = HERE / "leaving_functions.py"


def open_pool(name: str) -> HookPool:
    return HookPool(HookConfig(processes=1, deadline_s=120), [f"{FUNCTIONS}:{name}"])


def rewards(events: list[Any], name: str) -> list[float]:
    assert all(isinstance(event, Graded) for event in events), events
    return [event.grades[name][0].reward for event in events]


@pytest.mark.parametrize("name", ["leaves", "async_leaves"])
def test_what_a_call_leaves_is_not_there_for_the_next(name: str) -> None:
    with open_pool(name) as pool:
        (clean,) = rewards(grade_all(pool, ["look"]), name)
        harmed = []
        for what in LEAVES:
            grade_all(pool, [what])
            if rewards(grade_all(pool, ["look"]), name) != [clean]:
                harmed.append(what)
    assert harmed == []


def test_a_look_sees_what_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without a restored state, a look after it differs."""
    from tests.unit.hooks import leaving_functions

    before = leaving_functions.found()
    monkeypatch.setenv("LEFT", "1")
    assert leaving_functions.found() != before


def test_calls_beside_one_that_changes_the_process_are_made_again() -> None:
    """Quick calls are checked together. What one has left may have harmed those after it."""
    texts = ["leave", "look"] * 20
    with open_pool("leaves_folder") as pool:
        rewards(grade_all(pool, ["look"] * 3), "leaves_folder")
        events = grade_all(pool, texts)
    assert rewards(events, "leaves_folder") == [1.0] * len(texts)
    assert all(event.metrics == {event.notes["said"]: 1.0} for event in events), "of one call each"
    most = max(event.grades["leaves_folder"][0].parts["calls"] for event in events)
    assert most > 3 + len(texts), "some were made twice"


def test_a_seed_is_that_of_its_own_call() -> None:
    with open_pool("seeds") as pool:
        one, first, other, second = rewards(
            grade_all(pool, ["seed", "draw", "seed", "draw"]), "seeds"
        )
    assert one == other
    assert first != second


def pid_file(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.pidfd_open(pid)
    return None


def ended(descriptor: int | None) -> bool:
    """Whether a process has ended by now, or within a minute, the last resort."""
    if descriptor is None:
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    has_ended = bool(poll.poll(60_000))
    os.close(descriptor)
    return has_ended


@pytest.mark.parametrize("text", ["sleeps", "orphan"])
def test_a_process_in_a_session_of_its_own_ends_with_the_pool(text: str) -> None:
    with open_pool("starts") as pool:
        (pid,) = rewards(grade_all(pool, [text]), "starts")
        descriptor = pid_file(int(pid))
        assert descriptor is not None, "it runs"
        assert not select.select([descriptor], [], [], 0)[0]
    assert ended(descriptor)


def test_it_ends_too_if_the_process_of_its_hook_has_ended(tmp_path: Path) -> None:
    with open_pool("starts") as pool:
        (event,) = grade_all(pool, [str(tmp_path / "pid")])
        assert isinstance(event, Failed)
        descriptor = pid_file(int((tmp_path / "pid").read_text()))
    assert ended(descriptor)


def test_a_launcher_ends_what_hooks_of_a_killed_rank_have_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    orphans = Orphans()
    pids = []
    for environment in ({**os.environ, "SPMD_RL_HOOKS": "ab"}, dict(os.environ)):
        if not (pid := os.fork()):
            os.setsid()
            os.execvpe("sleep", ["sleep", "1000"], environment)
        pids.append(pid)
    marked, other = pids
    while not is_of_hooks(marked):
        pass
    monkeypatch.setattr("spmd_rl.controller.lifecycle.process_family.ORPHAN_EXIT_S", 0.0)
    orphans.end()
    assert f"pid {marked} (sleep)" in capsys.readouterr().err
    assert os.waitpid(marked, 0)[1] == signal.SIGKILL
    assert os.waitpid(other, os.WNOHANG)[0] == 0, "a server of somebody else goes on"
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
