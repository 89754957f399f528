"""Lifecycle of a worker: what ends its process, and with which sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spmd_rl.controller.channel.codec import NOTHING
from spmd_rl.controller.channel.messages import (
    Bye,
    ChannelMessage,
    Dying,
    Hello,
    Ping,
    Pong,
    Stacks,
    Stop,
)
from spmd_rl.controller.channel.secret import derive_keys
from spmd_rl.controller.lifecycle import worker_lifecycle
from spmd_rl.controller.lifecycle.worker_lifecycle import WorkerLifecycle

WHO = "rank 3 (host host, pid 12)"


class Exits:
    """Records how a worker ends its process, and what it posts before."""

    def __init__(self) -> None:
        self.posted: list[ChannelMessage] = []
        self.ended: list[tuple[str, int]] = []
        self.abandoned = False

    def end(self, sentence: str, exit_code: int) -> None:
        self.ended.append((sentence, exit_code))

    def abandon(self) -> None:
        self.abandoned = True


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Exits:
    exits = Exits()
    monkeypatch.setattr(worker_lifecycle, "end_process", exits.end)
    return exits


@pytest.fixture
def worker(tmp_path: Path, exits: Exits, monkeypatch: pytest.MonkeyPatch) -> WorkerLifecycle:
    """A worker whose controller never answers. Its background thread has ended."""
    keys, hello = derive_keys(b"a" * 32), Hello(3, "host", 12)
    worker = WorkerLifecycle(f"ipc://{tmp_path}/nobody", keys, 7, hello, exits.abandon)
    monkeypatch.setattr(worker.dealer, "close_for_exit", lambda: None)
    worker.close()
    monkeypatch.setattr(
        worker.dealer, "post", lambda message, value=NOTHING: exits.posted.append(message)
    )
    return worker


def test_a_stop_because_of_an_error_ends_the_process(worker: WorkerLifecycle, exits: Exits) -> None:
    worker.on_message(Stop("the disk is full", 2, []))
    assert exits.ended == [("the disk is full", 2)]
    assert [type(message) for message in exits.posted] == [Stacks, Bye]


def test_a_worker_whose_controller_is_lost_says_where_the_run_resumes(
    worker: WorkerLifecycle, exits: Exits, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.on_message(Ping(20.0, "runs/r/checkpoints"))
    assert worker.checkpoints == "runs/r/checkpoints"
    worker.on_tick(0.0)
    assert exits.ended == []
    worker.final_message.newest_step = lambda: 5
    monkeypatch.setattr(worker._watchdog, "controller_lost", lambda now: "lost the controller")
    worker.on_tick(0.0)
    sentence = f"{WHO} lost the controller; the same command goes on after step 5"
    assert exits.ended == [(sentence, 1)]
    assert exits.abandoned
    assert exits.posted == [Pong(), Dying("lost the controller")]


def test_a_worker_tells_what_its_roles_count(worker: WorkerLifecycle, exits: Exits) -> None:
    worker.counts = lambda: {"episodes/done": 3}
    worker.on_message(Ping(20.0, ""))
    assert exits.posted == [Pong({"episodes/done": 3})]


def test_a_worker_without_its_launcher_does_not_abandon_the_controller(
    worker: WorkerLifecycle, exits: Exits, monkeypatch: pytest.MonkeyPatch
) -> None:
    another = os.getppid() + 1
    monkeypatch.setattr("os.getppid", lambda: another)
    worker.on_tick(0.0)
    assert exits.ended[0][0].startswith(f"{WHO} lost its launcher (pid ")
    assert not exits.abandoned


def test_another_secret_is_bad_input(worker: WorkerLifecycle, exits: Exits) -> None:
    worker.on_handshake_failed()
    ((sentence, exit_code),) = exits.ended
    assert "rank 3 and the controller at ipc://" in sentence
    assert exit_code == 2
