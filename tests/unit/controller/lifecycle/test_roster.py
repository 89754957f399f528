"""Roster: which ranks are lost, and which signal ends a run."""

from __future__ import annotations

from spmd_rl.controller.channel.messages import Hello
from spmd_rl.controller.lifecycle.roster import ANSWER_PING_S, LATE_S, SIGNAL_ALL_S, Roster


def seated(size: int = 3) -> Roster:
    roster = Roster(size, lost_after_s=10.0)
    for rank in range(size):
        assert roster.add(Hello(rank, "host", 100 + rank), now=0.0)
    return roster


def test_seats_are_taken_once_and_only_in_the_world() -> None:
    roster = Roster(2, lost_after_s=10.0)
    assert roster.missing == [0, 1]
    assert not roster.add(Hello(2, "host", 1), 0.0)
    assert not roster.note_message(0, 0.0)
    assert roster.add(Hello(0, "host", 1), 0.0)
    assert not roster.add(Hello(0, "other", 2), 0.0)
    assert roster.missing == [1]


def test_the_silent_are_lost() -> None:
    roster = seated()
    roster.note_message(0, 9.0)
    roster.note_message(2, 9.0)
    assert roster.lost(10.0) == []
    assert roster.lost(10.5) == [1]


def test_who_is_neither_signalled_nor_heard_while_others_are_signalled_is_lost() -> None:
    roster = seated()
    roster.note_signal(0, "SIGTERM", 1.0)
    roster.note_signal(2, "SIGTERM", 1.1)
    roster.note_message(1, 1.0 + LATE_S / 2)
    assert roster.lost(1.0 + ANSWER_PING_S) == []
    assert roster.lost(1.1 + ANSWER_PING_S) == [1]
    assert roster.terminated_by(1.1 + ANSWER_PING_S) is None


def test_a_signal_to_some_while_the_others_live_on_names_those() -> None:
    roster = seated()
    roster.note_signal(1, "SIGINT", 1.0)
    roster.note_message(0, 1.0 + LATE_S)
    assert roster.terminated_by(1.1 + SIGNAL_ALL_S) is None, "rank 2 may be stopped"
    roster.note_message(2, 1.0 + LATE_S)
    assert roster.terminated_by(1.0 + SIGNAL_ALL_S) is None, (
        "the launcher may signal the others yet"
    )
    assert roster.terminated_by(1.1 + SIGNAL_ALL_S) == (
        "SIGINT",
        "rank 1 (host host, pid 101) got SIGINT",
    )
    assert roster.lost(1.1 + ANSWER_PING_S) == []
    assert roster.lost(11.6) == [0, 2], "silent for as long as any may be"


def test_many_that_are_signalled_are_not_all_named() -> None:
    roster = seated(7)
    for rank in range(6):
        roster.note_signal(rank, "SIGTERM", 1.0)
    roster.note_message(6, 2.0)
    ended = roster.terminated_by(1.1 + SIGNAL_ALL_S)
    assert ended is not None
    assert ended[1].endswith("rank 3 (host host, pid 103) and 2 more got SIGTERM")


def test_a_signal_before_all_have_reported_says_so() -> None:
    roster = Roster(2, lost_after_s=10.0)
    roster.add(Hello(1, "host", 101), now=0.0)
    roster.note_signal(1, "SIGTERM", 1.0)
    said = "rank 1 (host host, pid 101) got SIGTERM before ranks [0] had reported"
    assert roster.terminated_by(1.0) == ("SIGTERM", said)


def test_when_all_are_signalled_nobody_is_lost() -> None:
    roster = seated()
    for rank in range(3):
        roster.note_signal(rank, "SIGINT", 1.0)
    assert roster.terminated_by(1.0) == ("SIGINT", "every rank got SIGINT")
    assert roster.lost(100.0) == []


def test_a_signal_of_another_name_is_a_second_one() -> None:
    """A terminal and the launcher send the first, so each rank may get that twice."""
    roster = seated()
    for rank in (0, 1, 2, 1):
        roster.note_signal(rank, "SIGINT", 1.0)
    assert not roster.got_second_signal
    roster.note_signal(1, "SIGTERM", 2.0)
    assert roster.got_second_signal
    assert roster.terminated_by(2.0) == ("SIGINT", "every rank got SIGINT")


def test_an_orderly_end_has_no_cause() -> None:
    roster = seated()
    for rank in range(3):
        roster.note_gone(rank)
    assert roster.present == []
    assert roster.terminated_by(1.0) is None
