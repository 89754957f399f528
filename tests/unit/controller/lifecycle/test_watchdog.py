from __future__ import annotations

import signal

from spmd_rl.controller.lifecycle.watchdog import CLOSED_S, CONNECT_S, SIGNALLED_S, Watchdog

LAUNCHER = 10


def vigil() -> Watchdog:
    return Watchdog("ipc:///x", LAUNCHER, now=0.0)


def test_a_controller_that_never_speaks_is_given_up() -> None:
    assert vigil().given_up(CONNECT_S) is None
    assert vigil().given_up(CONNECT_S + 1) == "heard nothing from the controller at ipc:///x"


def test_each_ping_is_good_for_a_while() -> None:
    watch = vigil()
    for now in range(0, 100, 2):
        watch.pinged(3.0, float(now))
    assert watch.given_up(101.0) is None
    assert watch.given_up(101.5) == "lost the controller: silent for 3 s"


def test_a_closed_connection_shortens_the_wait_and_never_lengthens_it() -> None:
    watch = vigil()
    watch.pinged(20.0, 0.0)
    watch.disconnected(1.0)
    assert watch.given_up(1.0 + CLOSED_S + 0.1) == "lost the controller: its connection closed"
    watch.signalled(signal.SIGTERM, 2.0)
    assert watch.given_up(1.0 + CLOSED_S + 0.1) == "lost the controller: its connection closed"


def test_a_later_disconnection_does_not_prolong_the_wait() -> None:
    watch = vigil()
    watch.pinged(20.0, 0.0)
    watch.disconnected(1.0)
    watch.disconnected(1.0 + CLOSED_S - 0.1)
    assert watch.given_up(1.0 + CLOSED_S) is None
    assert watch.given_up(1.0 + CLOSED_S + 0.1) == "lost the controller: its connection closed"


def test_a_reconnection_is_forgiven() -> None:
    watch = vigil()
    watch.disconnected(1.0)
    watch.pinged(20.0, 2.0)
    assert watch.given_up(10.0) is None


def test_once_signalled_only_a_controller_that_speaks_keeps_it() -> None:
    watch = vigil()
    watch.pinged(20.0, 0.0)
    assert watch.signalled(signal.SIGTERM, 1.0)
    assert not watch.signalled(signal.SIGTERM, 2.0)
    assert watch.given_up(1.0 + SIGNALLED_S) is None
    assert watch.given_up(1.1 + SIGNALLED_S) == "was ended by SIGTERM"
    watch.pinged(20.0, 3.0)
    assert watch.given_up(3.0 + SIGNALLED_S) is None
    assert watch.given_up(3.1 + SIGNALLED_S) == "lost the controller: silent for 5 s"


def test_another_parent_means_that_the_launcher_is_gone() -> None:
    assert vigil().launcher_lost(LAUNCHER) is None
    assert vigil().launcher_lost(1) == "lost its launcher (pid 10)"
