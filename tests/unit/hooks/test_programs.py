"""Episodes with a context of their own, turns that are watched or cancelled, and programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spmd_rl.errors import ConfigError
from spmd_rl.hooks.config import HookConfig
from spmd_rl.hooks.rank.pool import HookPool
from spmd_rl.hooks.rank.tasks import EngineCall, EpisodeEnded, Failed, TurnCancelled
from spmd_rl.hooks.signatures import load_generate
from spmd_rl.hooks.transcript import Transcript
from tests.unit.hooks.cases import HOOKS, character_model, make_prompt
from tests.unit.hooks.test_pool import open_pool, play, turn_of


def test_a_transcript_may_have_a_context_of_its_own() -> None:
    calls: list[EngineCall] = []
    with open_pool(generate=f"{HOOKS}:play") as pool:

        def answer(call: EngineCall) -> None:
            calls.append(call)
            pool.reply(*turn_of(call))

        (event,) = play(pool, ["own_context"], answer)
    plain, own = event.samples
    assert [len(plain.context), own.context.tolist()] == [0, [60, 61, 62]]
    assert calls[0].context is None and calls[0].limits.stop_ids == ()
    assert calls[1].context is not None and calls[1].context.tolist() == [60, 61, 62]
    assert calls[1].limits.stop_ids == (5,)


@pytest.mark.parametrize("context", [[], [-1], [0.5], [[1]]])
def test_a_context_is_at_least_one_token_id(context: Any) -> None:
    with pytest.raises(ValueError, match="context: expected"):
        Transcript(make_prompt(), context)
    assert Transcript(make_prompt(), [4, 5]).num_tokens == 2


@pytest.mark.parametrize("shown", [[], [[0]], [[0], [1]]])
def test_new_tokens_are_seen_before_the_turn_and_once(shown: list[list[int]]) -> None:
    with open_pool(generate=f"{HOOKS}:play") as pool:

        def answer(call: EngineCall) -> None:
            assert call.streams
            for tokens in shown:
                pool.show(call.task_id, call.call_id, tokens)
            pool.reply(*turn_of(call))

        (event,) = play(pool, ["watches"], answer)
    assert isinstance(event, EpisodeEnded), event
    runs = min(len(shown) + 1, 2)
    assert event.samples[0].metadata["metrics"] == {"runs": runs}


def test_a_turn_for_which_nobody_waits_is_cancelled() -> None:
    seen: list[Any] = []
    with open_pool(generate=f"{HOOKS}:play") as pool:

        def answer(call: EngineCall | TurnCancelled) -> None:
            seen.append(call)
            if isinstance(call, EngineCall) and call.limits.max_tokens == 3:
                pool.reply(*turn_of(call))

        (event,) = play(pool, ["gives_up"], answer)
    assert isinstance(event, EpisodeEnded), event
    first, ended, second, also_ended, again = seen
    assert [one.transcript for one in (first, second, again)] == [0, 1, 0]
    assert [ended.call_id, also_ended.call_id] == [first.call_id, second.call_id]
    assert event.samples[0].metadata["notes"] == {"first": "the turn was cancelled"}


def test_a_typed_failure_is_told_and_ends_no_run() -> None:
    with open_pool(generate=f"{HOOKS}:play") as pool:
        (event,) = play(pool, ["tool_breaks"])
    assert isinstance(event, Failed)
    assert (event.kind, event.is_spared) == ("tool", True)
    assert event.problem == "tool: no answer from the search index"


@pytest.mark.parametrize(
    ("text", "limits", "kind", "problem"),
    [
        ("sleeps", {"episode_deadline_s": 0.5}, "timeout", "took longer than 0.5 s"),
        ("holds_the_loop", {"deadline_s": 2.0}, "timeout", "held its event loop for longer"),
        ("breaks_once", {}, "agent", "ended its process with exit code 4"),
    ],
)
def test_an_episode_that_gives_no_answer_ends_no_run(
    text: str, limits: dict[str, float], kind: str, problem: str
) -> None:
    with open_pool(generate=f"{HOOKS}:play", **limits) as pool:
        bad, good = play(pool, [text, "two_turns"])
    assert isinstance(bad, Failed)
    assert (bad.kind, bad.is_spared) == (kind, True)
    assert problem in bad.problem
    assert isinstance(good, EpisodeEnded)


def test_an_error_of_an_episode_has_no_kind() -> None:
    with open_pool(generate=f"{HOOKS}:play") as pool:
        (event,) = play(pool, ["returns_nothing"])
    assert isinstance(event, Failed)
    assert (event.kind, event.is_spared) == (None, False)


def test_a_program_is_opened_once_and_closed(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    cfg = HookConfig(generate=f"{HOOKS}:Counted", processes=1)
    with HookPool(cfg, config={"closed": str(closed)}, rank=3, model=character_model()) as pool:
        events = play(pool, ["a", "b", "c"])
        told = [event.samples[0].metadata for event in events]
        assert not closed.exists()
    assert sorted(one["metrics"]["played"] for one in told) == [1, 2, 3]
    assert {one["notes"]["site"] for one in told} == {"3 [97, 98]"}
    assert closed.read_text() == "3"


def test_a_program_that_cannot_open_ends_the_run() -> None:
    cfg = HookConfig(generate=f"{HOOKS}:CannotOpen")
    told = r"CannotOpen': open raised OSError: the port is taken \(at hook_functions.py:\d+\)"
    with (
        HookPool(cfg, config={"closed": "/nowhere"}, model=character_model()) as pool,
        pytest.raises(ConfigError, match=told),
    ):
        play(pool, ["a"])


@pytest.mark.parametrize("name", ["HasNoClose", "Path"])
def test_another_class_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"write it as a class without arguments that has async"):
        load_generate(f"{HOOKS}:{name}")
