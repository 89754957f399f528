"""Random faults in graders and episodes. `python -m benchmarks.hook_faults` makes more of them."""

from __future__ import annotations

import time

import pytest

from benchmarks.faulty_hooks import ASYNC, EPISODE, PLAIN, is_slow, known
from benchmarks.hook_faults import Case, make_cases, run
from spmd_rl.hooks.rank.worker import HookWorker
from spmd_rl.hooks.wire.channel import NO_CALL


def test_random_faults_fail_their_own_samples_and_no_others() -> None:
    outcome = run(make_cases(25, seed=33, slow_share=0.1), deadline_s=3.0)
    assert outcome.wrong == {}


def test_a_wrong_charge_fails_another_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The negative control: the end of a process is charged to the last call that it got."""

    def last_call(worker: HookWorker) -> tuple[int, float]:
        return next(reversed(worker.calls), NO_CALL), time.monotonic()

    monkeypatch.setattr(HookWorker, "running", last_call)
    cases = [Case(uid, PLAIN, "", "") for uid in range(1, 40)]
    cases[10] = Case(11, PLAIN, "os._exit", known(PLAIN)["os._exit"])
    assert run(cases, deadline_s=60.0).wrong


def test_every_fault_is_known_where_it_may_happen() -> None:
    names = {place: {*known(place)} for place in (PLAIN, ASYNC, EPISODE)}
    assert names[PLAIN] < names[ASYNC]
    assert {"hang", "segfault"} <= names[PLAIN] & names[EPISODE]
    assert is_slow("spin") and is_slow("hang") and not is_slow("segfault")
