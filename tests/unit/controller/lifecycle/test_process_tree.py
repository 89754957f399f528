"""Processes of workers: only children of the given launcher on this host are killed."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
from collections.abc import Iterator

import pytest

from spmd_rl.controller.channel.messages import Hello
from spmd_rl.controller.lifecycle.process_tree import (
    ChildWatcher,
    is_ending,
    kill_children,
    parent_of,
    says_ending,
    wait_for_exits,
)

HERE = socket.gethostname()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_parent_is_known_and_a_missing_process_has_none(child: subprocess.Popen[bytes]) -> None:
    assert parent_of(child.pid) == os.getpid()
    assert parent_of(2**22 + 1) is None


def test_an_end_is_told_once_at_the_second_look(child: subprocess.Popen[bytes]) -> None:
    children = ChildWatcher(os.getpid())
    children.watch(Hello(1, HERE, child.pid))
    children.watch(Hello(2, "elsewhere", child.pid))
    assert children.ended() == []
    child.kill()
    wait_for_exits([Hello(1, HERE, child.pid)])
    assert [children.ended() for _ in range(3)] == [[], [1], []]
    children.close()


def test_the_children_of_others_are_not_watched(child: subprocess.Popen[bytes]) -> None:
    children = ChildWatcher(os.getppid())
    children.watch(Hello(1, HERE, child.pid))
    child.kill()
    wait_for_exits([Hello(1, HERE, child.pid)])
    assert [children.ended() for _ in range(3)] == [[], [], []]


def test_a_stopped_child_is_ended(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGSTOP)
    kill_children(os.getpid(), [Hello(1, HERE, child.pid)])
    assert child.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("host", [HERE, "elsewhere"])
def test_others_are_left_alone(child: subprocess.Popen[bytes], host: str) -> None:
    launcher = os.getppid() if host == HERE else os.getpid()
    kill_children(launcher, [Hello(1, host, child.pid)])
    wait_for_exits([])
    assert child.poll() is None


def test_an_end_is_waited_for(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    wait_for_exits([Hello(1, HERE, child.pid)])
    assert child.poll() is not None


def test_an_end_is_waited_for_with_a_descriptor_that_select_does_not_take(
    child: subprocess.Popen[bytes],
) -> None:
    """A controller of many ranks has a socket for each."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, before[1]), before[1]))
    many = [os.dup(0) for _ in range(1100)]
    try:
        child.kill()
        wait_for_exits([Hello(1, HERE, child.pid)])
        assert child.poll() is not None
    finally:
        for descriptor in many:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_end_is_seen_before_anybody_waits_for_it(child: subprocess.Popen[bytes]) -> None:
    assert not is_ending(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_ending(child.pid), "a zombie"
    child.wait()
    assert is_ending(child.pid), "no process"


@pytest.mark.parametrize(
    ("state", "pending", "expected"),
    [
        ("S (sleeping)", "0000000000000000", False),
        ("R (running)", "0000000000000002", False),  # SIGINT
        ("R (running)", "0000000000000100", True),  # SIGKILL
        ("Z (zombie)", "0000000000000000", True),
    ],
)
def test_a_pending_sigkill_ends_a_process(state: str, pending: str, expected: bool) -> None:
    status = f"Name:\tpython\nState:\t{state}\nSigPnd:\t{pending}\nShdPnd:\t0000000000000000\n"
    assert says_ending(status) == expected
