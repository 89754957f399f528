"""Watchdog: when a worker gives up its controller or its launcher."""

from __future__ import annotations

import signal

from spmd_rl.controller.lifecycle.watchdog import CONNECT_S, DISCONNECTED_S, SIGNALLED_S, Watchdog

LAUNCHER = 10


def watchdog() -> Watchdog:
    return Watchdog("ipc:///x", LAUNCHER, now=0.0)


def test_a_controller_that_never_speaks_is_controller_lost() -> None:
    assert watchdog().controller_lost(CONNECT_S) is None
    assert (
        watchdog().controller_lost(CONNECT_S + 1) == "heard nothing from the controller at ipc:///x"
    )


def test_each_ping_is_good_for_a_while() -> None:
    dog = watchdog()
    for now in range(0, 100, 2):
        dog.pinged(3.0, float(now))
    assert dog.controller_lost(101.0) is None
    assert dog.controller_lost(101.5) == "lost the controller: silent for 3 s"


def test_a_closed_connection_shortens_the_wait_and_never_lengthens_it() -> None:
    dog = watchdog()
    dog.pinged(20.0, 0.0)
    dog.disconnected(1.0)
    assert (
        dog.controller_lost(1.0 + DISCONNECTED_S + 0.1)
        == "lost the controller: its connection closed"
    )
    dog.signalled(signal.SIGTERM, 2.0)
    assert (
        dog.controller_lost(1.0 + DISCONNECTED_S + 0.1)
        == "lost the controller: its connection closed"
    )


def test_a_later_disconnection_does_not_prolong_the_wait() -> None:
    dog = watchdog()
    dog.pinged(20.0, 0.0)
    dog.disconnected(1.0)
    dog.disconnected(1.0 + DISCONNECTED_S - 0.1)
    assert dog.controller_lost(1.0 + DISCONNECTED_S) is None
    assert (
        dog.controller_lost(1.0 + DISCONNECTED_S + 0.1)
        == "lost the controller: its connection closed"
    )


def test_a_reconnection_is_forgiven() -> None:
    dog = watchdog()
    dog.disconnected(1.0)
    dog.pinged(20.0, 2.0)
    assert dog.controller_lost(10.0) is None


def test_once_signalled_only_a_controller_that_speaks_keeps_it() -> None:
    dog = watchdog()
    dog.pinged(20.0, 0.0)
    assert dog.signalled(signal.SIGTERM, 1.0)
    assert not dog.signalled(signal.SIGTERM, 2.0)
    assert dog.signalled(signal.SIGINT, 2.0), "a second signal"
    assert dog.signal is signal.SIGTERM
    assert dog.controller_lost(1.0 + SIGNALLED_S) is None
    assert dog.controller_lost(1.1 + SIGNALLED_S) == "was ended by SIGTERM"
    dog.pinged(20.0, 3.0)
    assert dog.controller_lost(3.0 + SIGNALLED_S) is None
    assert dog.controller_lost(3.1 + SIGNALLED_S) == "lost the controller: silent for 5 s"


def test_another_parent_means_that_the_launcher_is_gone() -> None:
    assert watchdog().launcher_lost(LAUNCHER) is None
    assert watchdog().launcher_lost(1) == "lost its launcher (pid 10)"
