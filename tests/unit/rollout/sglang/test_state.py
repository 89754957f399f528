"""The state machine in front of the scheduler: what it allows, and what it refuses."""

from __future__ import annotations

import pytest

from spmd_rl.errors import ResidencyError, SpmdError
from spmd_rl.rollout.sglang.state import EngineState


def ready(sleep_weights: bool = True) -> EngineState:
    state = EngineState(sleep_weights)
    state.begin_push()
    state.end_push(4)
    return state


def test_it_generates_after_a_push() -> None:
    state = EngineState(True)
    assert not state.can_generate
    with pytest.raises(SpmdError, match="no weights of a known version"):
        state.require_generate()
    state.begin_push()
    assert not state.can_generate
    state.end_push(4)
    assert state.require_generate() == 4


def test_weights_that_sleep_come_back_with_a_push() -> None:
    state = ready()
    assert state.begin_sleep(0) == ["kv_cache", "weights"]
    assert state.begin_sleep(0) == []
    with pytest.raises(ResidencyError, match="asleep"):
        state.require_generate()
    with pytest.raises(ResidencyError, match="wake it before weights are pushed"):
        state.begin_push()
    assert state.begin_wake() == ["kv_cache", "weights"]
    assert state.begin_wake() == []
    with pytest.raises(SpmdError, match="no weights of a known version"):
        state.require_generate()


def test_weights_that_stay_awake_are_used_again() -> None:
    state = ready(sleep_weights=False)
    assert state.begin_sleep(0) == ["kv_cache"]
    assert state.begin_wake() == ["kv_cache"]
    assert state.require_generate() == 4


def test_sleep_while_busy_is_refused() -> None:
    state = ready()
    with pytest.raises(ResidencyError, match="cannot sleep while 3 requests run"):
        state.begin_sleep(3)
    assert not state.is_asleep


def test_sleep_during_a_push_is_refused() -> None:
    state = ready()
    state.begin_push()
    with pytest.raises(ResidencyError, match="cannot sleep during a push"):
        state.begin_sleep(0)


def test_a_commit_without_a_push_is_refused() -> None:
    with pytest.raises(SpmdError, match="committed and never pushed"):
        ready().end_push(5)


def test_weights_wake_for_a_push_before_the_pages() -> None:
    state = ready()
    assert state.begin_sleep(0, ("weights", "kv")) == ["kv_cache", "weights"]
    assert state.begin_wake(("weights",)) == ["weights"]
    state.begin_push()
    state.end_push(5)
    assert not state.can_generate
    with pytest.raises(ResidencyError, match="asleep"):
        state.require_generate()
    assert state.begin_wake(("kv",)) == ["kv_cache"]
    assert state.require_generate() == 5


def test_tags_that_never_sleep_are_left_out() -> None:
    state = ready(sleep_weights=False)
    assert state.begin_sleep(0, ("weights",)) == []
    assert state.begin_sleep(0, ("weights", "kv")) == ["kv_cache"]
    state.begin_push()
    state.end_push(5)
    assert state.begin_wake(("weights",)) == []
    assert state.begin_wake(("kv",)) == ["kv_cache"]
    assert state.require_generate() == 5
