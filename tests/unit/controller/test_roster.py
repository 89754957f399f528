from __future__ import annotations

from spmd_rl.controller.roster import FAREWELL_S, Roster
from spmd_rl.controller.wire import Hello


def seated(size: int = 3) -> Roster:
    roster = Roster(size, lost_after_s=10.0)
    for rank in range(size):
        assert roster.hello(Hello(rank, "host", 100 + rank), now=0.0)
    return roster


def test_seats_are_taken_once_and_only_in_the_world() -> None:
    roster = Roster(2, lost_after_s=10.0)
    assert roster.missing == [0, 1]
    assert not roster.hello(Hello(2, "host", 1), 0.0)
    assert not roster.heard(0, 0.0)
    assert roster.hello(Hello(0, "host", 1), 0.0)
    assert not roster.hello(Hello(0, "other", 2), 0.0)
    assert roster.missing == [1]


def test_the_silent_are_lost() -> None:
    roster = seated()
    roster.heard(0, 9.0)
    roster.heard(2, 9.0)
    assert roster.lost(10.0) == []
    assert roster.lost(10.5) == [1]


def test_who_is_not_signalled_while_others_are_is_lost() -> None:
    roster = seated()
    roster.signalled(0, "SIGTERM", 1.0)
    roster.signalled(2, "SIGTERM", 1.1)
    assert roster.lost(1.0 + FAREWELL_S) == []
    assert roster.lost(1.1 + FAREWELL_S) == [1]
    assert roster.ended_by is None


def test_when_all_are_signalled_nobody_is_lost() -> None:
    roster = seated()
    for rank in range(3):
        roster.signalled(rank, "SIGINT", 1.0)
    assert roster.ended_by == "SIGINT"
    assert roster.lost(100.0) == []


def test_an_orderly_end_has_no_cause() -> None:
    roster = seated()
    for rank in range(3):
        roster.gone(rank)
    assert roster.staying == []
    assert roster.ended_by is None
