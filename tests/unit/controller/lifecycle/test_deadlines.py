"""Deadlines of a run that a signal ends, and of a recipe that makes no call."""

from __future__ import annotations

import pytest

from spmd_rl.controller.lifecycle.deadlines import RecipeDeadline, TerminationNotice


def test_sigterm_leaves_the_grace_and_then_says_what_is_lost() -> None:
    notice = TerminationNotice()
    assert notice.overdue(1e9) is None
    notice.grace_s, notice.lost_work = 25.0, "; step 8 is lost"
    assert notice.note_signal("SIGTERM", "every rank got SIGTERM", 100.0)
    assert not notice.note_signal("SIGTERM", "the controller got SIGTERM", 101.0)
    assert notice.overdue(124.9) is None
    late, saved = notice.overdue(125.0), notice.error_with("; saved")
    assert str(late) == "the run was ended from outside: every rank got SIGTERM; step 8 is lost"
    assert str(saved) == "the run was ended from outside: every rank got SIGTERM; saved"
    assert late is not None
    assert late.exit_code == saved.exit_code == 143


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize("second", [False, True])
def test_a_second_signal_and_a_run_with_nothing_to_save_end_at_once(
    name: str, code: int, second: bool
) -> None:
    notice = TerminationNotice()
    notice.grace_s = 25.0 if second else 0.0
    notice.lost_work = "; step 8 did not end in time" if second else ""
    notice.note_signal(name, "somebody", 100.0)
    if second:
        assert notice.overdue(100.0) is None
        notice.end_grace()
    error = notice.overdue(100.0)
    assert str(error) == "the run was ended from outside: somebody", "nobody waited for a step"
    assert error is not None
    assert error.exit_code == code


def test_a_recipe_may_compute_for_its_limit_since_it_was_last_seen_to_wait() -> None:
    deadline = RecipeDeadline(10.0)
    assert deadline.overdue(False, 0.0, 1e9) is None, "it has not begun"
    with deadline.running(100.0):
        assert deadline.overdue(False, 0.0, 110.0) is None
        assert "no call for 10 s" in str(deadline.overdue(False, 0.0, 110.1))
        assert deadline.overdue(True, 0.0, 150.0) is None, "a rank owes it an answer"
        assert deadline.overdue(False, 0.0, 160.0) is None
        assert deadline.overdue(False, 0.5, 200.0) is None, "it has waited in between"
        assert deadline.overdue(False, 0.5, 210.1) is not None
    assert deadline.overdue(False, 0.5, 1e9) is None, "it is over"
