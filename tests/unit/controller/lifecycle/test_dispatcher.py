"""Dispatcher with real sockets and without workers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from pathlib import Path
from signal import SIGTERM

import pytest

from spmd_rl.config.run import RunConfig
from spmd_rl.controller.channel.codec import NOTHING
from spmd_rl.controller.channel.messages import (
    Bye,
    Dying,
    Hello,
    Ping,
    Pong,
    StackRequest,
    Stacks,
    Stop,
)
from spmd_rl.controller.channel.router import Router
from spmd_rl.controller.channel.secret import derive_keys
from spmd_rl.controller.lifecycle import dispatcher, exit_message, snapshots
from spmd_rl.controller.lifecycle.dispatcher import Dispatcher
from spmd_rl.controller.lifecycle.failure_detector import LAST_MESSAGES_S
from spmd_rl.controller.lifecycle.shutdown import FinalMessage
from spmd_rl.errors import ConfigError, DeadlineError, DiskError, LostRankError, SpmdError


def board(folder: Path, lifeline: socket.socket, start_s: float = 30.0) -> Dispatcher:
    run = RunConfig(folder=str(folder), start_s=start_s)
    return Dispatcher(
        run,
        2,
        f"ipc://{folder}/s",
        derive_keys(b"a" * 32),
        7,
        lifeline,
        last_resort=lambda code: None,
    )


def test_a_rank_0_that_is_gone_before_the_controller_listens_is_noticed(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        lost = board(tmp_path, ours)
        with pytest.raises(LostRankError, match="lost rank 0 before it had reported"):
            lost.wait_for_all()
        assert lost.calls.cause is not None
        lost.stop(lost.calls.cause)


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        waiting = board(tmp_path, ours, start_s=0.1)
        with pytest.raises(DeadlineError, match=r"ranks \[0, 1\] did not report within 0.1 s"):
            waiting.wait_for_all()
        waiting.stop(DeadlineError("they did not come"))


def test_stacks_are_not_waited_for_from_those_who_have_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Router, "post", lambda self, ranks, message: None)  # nobody has connected
    monkeypatch.setattr(snapshots, "GATHER_S", 300.0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        asking = board(tmp_path, ours)
        for rank in range(2):
            asking.on_message(rank, Hello(rank, "host", 2**22 + rank), NOTHING, 0)
        texts: list[str] = []
        thread = threading.Thread(target=lambda: texts.append(asking.stacks()))
        began = time.monotonic()
        thread.start()
        asking.on_message(1, Bye(), NOTHING, 0)
        while thread.is_alive():
            asking.on_message(0, Stacks("here", "a stack of rank 0", {}), NOTHING, 0)
            thread.join(0.05)
        assert time.monotonic() - began < snapshots.GATHER_S
        assert "a stack of rank 0" in texts[0]
        asking.on_message(0, Bye(), NOTHING, 0)
        asking.stop(None)


def test_a_signal_ends_the_run_with_its_code_once_the_grace_is_over(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ending = board(tmp_path, ours)
        ending.termination.grace_s = 0.5
        ending.on_signal(SIGTERM)
        assert ending.termination.error is not None
        assert ending.calls.cause is None, "there is time to save something"
        with pytest.raises(LostRankError, match="the controller got SIGTERM") as raised:
            ending.wait_for_all()
        assert raised.value.exit_code == 143
        ending.stop(raised.value)


def test_an_answer_that_comes_while_stacks_are_gathered_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def post(router: Router, ranks: object, message: object, payload: bytes = b"") -> None:
        """Nobody has connected. Rank 0 answers when it is asked for its stack."""
        if isinstance(message, StackRequest):
            late.on_result(record.number, 0, (b"\xc0", b""))

    monkeypatch.setattr(Router, "post", post)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        late = board(tmp_path, ours)
        late.on_message(0, Hello(0, "host", 2**22), NOTHING, 0)
        record = late.calls.open("actor.work", (0,))
        assert late.collect(record, deadline_s=0.1)[0][0] == b"\xc0"
        late.on_message(0, Bye(), NOTHING, 0)
        late.stop(None)


def test_counts_of_all_ranks_are_summed(tmp_path: Path) -> None:
    told: list[dict[str, int]] = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        counting = board(tmp_path, ours)
        counting.on_counts = told.append
        for rank in range(2):
            assert not counting.on_message(rank, Pong({"a": 9}), NOTHING, 0), "nobody is there"
            counting.on_message(rank, Hello(rank, "host", 2**22), NOTHING, 0)
        for rank, counts in ((0, {"a": 1}), (1, {"a": 2, "b": 0}), (0, {"a": 5})):
            counting.on_message(rank, Pong(counts), NOTHING, 0)
        assert told == [{"a": 1}, {"a": 3, "b": 0}, {"a": 7, "b": 0}]
        for rank in range(2):
            counting.on_message(rank, Bye(), NOTHING, 0)
        counting.stop(None)


def test_who_comes_while_the_world_ends_is_told_and_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: list[tuple[list[int], object]] = []
    monkeypatch.setattr(
        Router, "post", lambda self, ranks, message: posted.append((list(ranks), message))
    )
    ours, theirs = socket.socketpair()
    with ours, theirs, subprocess.Popen(["sleep", "60"]) as rank:
        ending = board(tmp_path, ours)
        monkeypatch.setattr(ending._shutdown, "_launcher", os.getpid())
        close = ending._router.close

        def come_late() -> None:
            ending.on_message(0, Hello(0, socket.gethostname(), rank.pid), NOTHING, 0)
            close()

        monkeypatch.setattr(ending._router, "close", come_late)
        ending.stop(ConfigError("the folder is another run's"))
        ended = rank.poll()
        rank.kill()
        assert ended is None
        told = Stop("the folder is another run's", 2, [])
        assert [said for said in posted if not isinstance(said[1], Ping)] == [
            ([], told),
            ([0], told),
        ]


@pytest.mark.parametrize("heeded", [True, False])
def test_the_controller_says_why_where_no_rank_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heeded: bool
) -> None:
    """Two ranks are stopped. One is given up first, and the other does not answer."""
    monkeypatch.setattr(Router, "post", lambda self, ranks, message: None)
    monkeypatch.setattr(dispatcher, "FAILED_BYE_S", 0.2)
    monkeypatch.setenv(exit_message.ERROR_FILE_ENV, str(tmp_path / "error.json"))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ending = board(tmp_path, ours)
        for rank in range(2):
            ending.on_message(rank, Hello(rank, "host", 2**22 + rank), NOTHING, 0)
        ending.on_unreachable(0)
        ending.on_tick(time.monotonic() + LAST_MESSAGES_S)
        if heeded:
            ending.on_message(1, Bye(), NOTHING, 0)
        ending.stop(ending.calls.cause)
    said = [json.loads(file.read_text())["message"] for file in tmp_path.glob("error.json")]
    assert said == ([] if heeded else [str(ending.calls.cause)])


def test_who_is_lost_is_told_with_how_to_go_on_once_the_screen_is_left(
    tmp_path: Path, monkeypatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(dispatcher, "FAILED_BYE_S", 0.1)
    monkeypatch.setattr(
        Router, "post", lambda self, ranks, message: said.append(getattr(message, "sentence", ""))
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ending = board(tmp_path, ours)
        ending.final_message.newest_step = lambda: 20
        ending.final_message.leave_screen = lambda: said.append("the screen is left")
        ending.on_message(1, Hello(1, "host", 2**22), NOTHING, 0)
        ending.on_unreachable(1)
        ending.on_tick(time.monotonic() + LAST_MESSAGES_S)
        ending.stop(ending.calls.cause)
    told = [sentence for sentence in said if sentence]
    assert told[0] == "the screen is left"
    assert told[1].startswith("lost rank 1 (host host, pid 4194304), last heard ")
    assert told[1].endswith(", between calls; the same command goes on after step 20")
    assert str(ending.calls.cause) == told[1]


@pytest.mark.parametrize("told", [True, False])
def test_a_rank_that_ended_itself_is_heard_before_it_is_lost(tmp_path: Path, told: bool) -> None:
    """The end of its connection is noticed before its last message is read."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ending = board(tmp_path, ours)
        ending.on_message(1, Hello(1, "host", 2**22), NOTHING, 0)
        now = time.monotonic()
        ending.on_unreachable(1)
        ending.on_tick(now)
        assert ending.calls.cause is None
        if told:
            ending.on_message(1, Dying("lost its launcher (pid 7)"), NOTHING, 0)
        ending.on_tick(now + 2 * LAST_MESSAGES_S)
        ending.stop(ending.calls.cause)
    who = "rank 1 (host host, pid 4194304)"
    expected = f"{who} lost its launcher (pid 7), " if told else f"lost {who}, last heard "
    assert str(ending.calls.cause).startswith(expected)


released = threading.Event()


def hang() -> None:
    released.wait()


@pytest.mark.parametrize(
    ("error", "newest", "expected"),
    [
        (LostRankError("lost rank 1"), lambda: None, "lost rank 1"),
        (LostRankError("lost rank 1"), hang, "lost rank 1"),
        (DeadlineError("no answer"), lambda: 3, "no answer; the same command goes on after step 3"),
        (DiskError("no room"), lambda: 3, "no room; the same command goes on after step 3"),
        (ConfigError("no data"), lambda: 3, "no data"),
        (
            LostRankError("saved after step 4, the same command goes on"),
            lambda: 3,
            "saved after step 4, the same command goes on",
        ),
    ],
)
def test_a_final_message_takes_no_time(error: SpmdError, newest, expected: str) -> None:
    message = FinalMessage()
    message.newest_step = newest
    assert message.compose(error) == str(error) == expected, "else it waits for ever"
    released.set()
    released.clear()
