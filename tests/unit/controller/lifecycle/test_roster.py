from __future__ import annotations

from spmd_rl.controller.channel.wire import Hello
from spmd_rl.controller.lifecycle.roster import FAREWELL_S, LATE_S, SHOW_S, Roster


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


def test_who_is_neither_signalled_nor_heard_while_others_are_signalled_is_lost() -> None:
    roster = seated()
    roster.signalled(0, "SIGTERM", 1.0)
    roster.signalled(2, "SIGTERM", 1.1)
    roster.heard(1, 1.0 + LATE_S / 2)
    assert roster.lost(1.0 + SHOW_S) == []
    assert roster.lost(1.1 + SHOW_S) == [1]
    assert roster.ended_by(1.1 + SHOW_S) is None


def test_a_signal_to_some_while_the_others_live_on_names_those() -> None:
    roster = seated()
    roster.signalled(1, "SIGINT", 1.0)
    roster.heard(0, 1.0 + LATE_S)
    assert roster.ended_by(1.1 + FAREWELL_S) is None, "rank 2 may be stopped"
    roster.heard(2, 1.0 + LATE_S)
    assert roster.ended_by(1.0 + FAREWELL_S) is None, "the launcher may signal the others yet"
    assert roster.ended_by(1.1 + FAREWELL_S) == ("SIGINT", "rank 1 (host host, pid 101) got SIGINT")
    assert roster.lost(1.1 + SHOW_S) == []
    assert roster.lost(11.6) == [0, 2], "silent for as long as any may be"


def test_many_that_are_signalled_are_not_all_named() -> None:
    roster = seated(7)
    for rank in range(6):
        roster.signalled(rank, "SIGTERM", 1.0)
    roster.heard(6, 2.0)
    ended = roster.ended_by(1.1 + FAREWELL_S)
    assert ended is not None
    assert ended[1].endswith("rank 3 (host host, pid 103) and 2 more got SIGTERM")


def test_a_signal_before_all_have_reported_says_so() -> None:
    roster = Roster(2, lost_after_s=10.0)
    roster.hello(Hello(1, "host", 101), now=0.0)
    roster.signalled(1, "SIGTERM", 1.0)
    said = "rank 1 (host host, pid 101) got SIGTERM before ranks [0] had reported"
    assert roster.ended_by(1.0) == ("SIGTERM", said)


def test_when_all_are_signalled_nobody_is_lost() -> None:
    roster = seated()
    for rank in range(3):
        roster.signalled(rank, "SIGINT", 1.0)
    assert roster.ended_by(1.0) == ("SIGINT", "every rank got SIGINT")
    assert roster.lost(100.0) == []


def test_an_orderly_end_has_no_cause() -> None:
    roster = seated()
    for rank in range(3):
        roster.gone(rank)
    assert roster.staying == []
    assert roster.ended_by(1.0) is None
