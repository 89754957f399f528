"""Parts of an episode: its transcript, its turns and its time."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spmd_rl.hooks.child.async_calls import LONG_STEP_S, LoopClock, Stopwatch
from spmd_rl.hooks.context import CallInfo
from spmd_rl.hooks.rank.episode_tasks import EpisodeTasks
from spmd_rl.hooks.rank.tasks import EpisodeTask
from spmd_rl.hooks.transcript import Transcript, TranscriptPlace, Turn, TurnLimits
from spmd_rl.hooks.wire.messages import AskTurn
from spmd_rl.types.token_data import TokenData
from tests.unit.hooks.cases import make_prompt


def turn(*tokens: int, status: Any = "completed", kept: bytes = b"") -> Turn:
    num = len(tokens)
    logprobs = np.full(num, -1, np.float32)
    return Turn(
        TokenData(np.array(tokens, np.int32), logprobs, np.full(num, 2, np.int32), kept), "", status
    )


def test_a_transcript_appends_turns_and_masked_observations() -> None:
    transcript = Transcript(make_prompt())
    transcript.place = TranscriptPlace(1, 5, 0.7)
    transcript.append(turn(1, 2, status="truncated", kept=b"\3\0\4\0"))
    transcript.observe([8, 9])
    transcript.observe([])
    transcript.observe(np.array([10], np.int64))
    transcript.append(turn(3, kept=b"\5\0"))
    sample = transcript.sample()
    assert sample.tokens.tolist() == [1, 2, 8, 9, 10, 3]
    assert sample.mask.tolist() == [True, True, False, False, False, True]
    assert sample.logprobs.tolist() == [-1, -1, 0, 0, 0, -1]
    assert sample.kept == b"\3\0\4\0" + b"\0\0\0" + b"\5\0"
    assert (sample.index, sample.temperature, sample.status) == (5, 0.7, "completed")
    assert transcript.sample("truncated").status == "truncated"
    assert transcript.num_tokens == 2 + 6
    assert (sample.tokens.dtype, sample.versions.dtype) == (np.int32, np.int32)


@pytest.mark.parametrize("tokens", [[-1], [1 << 31], [0.5], ["a"], [[1, 2]]])
def test_only_token_ids_can_be_observed(tokens: Any) -> None:
    with pytest.raises(ValueError, match=r"observe: expected token ids, such as await engine"):
        Transcript(make_prompt()).observe(tokens)


def test_there_is_no_sample_before_the_first_turn() -> None:
    transcript = Transcript(make_prompt())
    transcript.observe([1])
    with pytest.raises(ValueError, match="has drawn nothing in this transcript yet"):
        transcript.sample()


class Played:
    """An episode, of which the test is the process."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        worker = SimpleNamespace(send=self.sent.append)
        group: Any = SimpleNamespace(add=lambda ids: None, worker_of=lambda call_id: worker)
        self.tasks = EpisodeTasks("play", group, itertools.count(10))
        self.tasks.open(0, EpisodeTask(make_prompt(), 0, 1, 1.0, CallInfo()))

    def ask(self, ask_id: int, *tokens: int, transcript: int = 0, stop: Any = None) -> int | None:
        """Return the call that the engine gets, if it gets one."""
        past = turn(*tokens)
        arrays = past.tokens, past.logprobs, past.versions
        message = AskTurn(0, ask_id, transcript, TokenData(*arrays), TurnLimits(4, stop))
        calls = [event.call_id for event in self.tasks.take(message)]  # type: ignore[union-attr]
        return calls[0] if calls else None

    def replies(self) -> list[tuple[int, Any]]:
        found = [(one.ask_id, one.turn) for one in self.sent]
        self.sent.clear()
        return found


def test_a_question_is_asked_once() -> None:
    played, drawn = Played(), turn(7)
    calls = [
        played.ask(0, 1, 2),
        played.ask(1, 1, 2, transcript=1),
        played.ask(2, 1, 2, stop=("x",)),
        played.ask(3, 1),
    ]
    assert calls == [10, 11, 12, 13]
    played.tasks.reply(0, 10, turn=drawn)
    assert played.ask(4, 1, 2) is None
    found = played.replies()
    assert [ask_id for ask_id, _ in found] == [0, 4]
    assert all(one is drawn for _, one in found)


def test_an_episode_that_starts_again_gets_the_turns_that_were_drawn() -> None:
    played, first, second = Played(), turn(7), turn(8)
    played.tasks.reply(0, played.ask(0) or 0, turn=first)
    asked = played.ask(1, 7)
    played.tasks.message(0)
    assert played.ask(0) is None
    assert played.ask(1, 7) is None, "the engine draws it already"
    played.tasks.reply(0, asked or 0, turn=second)
    played.tasks.message(0)
    assert played.ask(5, 7) is None
    expected = [(0, first), (0, first), (1, second), (5, second)]
    found = played.replies()
    assert all(one is two for (_, one), (_, two) in zip(found, expected, strict=True))
    assert [ask_id for ask_id, _ in found] == [0, 0, 1, 5]


def test_an_answer_for_nobody_is_kept() -> None:
    played, drawn = Played(), turn(7)
    asked = played.ask(0)
    played.tasks.message(0)
    played.tasks.reply(0, asked or 0, turn=drawn)
    assert played.replies() == []
    assert played.ask(0) is None
    assert played.replies()[0][1] is drawn


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_step_that_holds_the_loop_counts_for_its_own_call_only() -> None:
    clock = Clock()
    loop = LoopClock(clock)
    holder, other = Stopwatch(loop), Stopwatch(loop)
    clock.now_s = 5.0
    loop.add_step(5.0, holder)
    assert (holder.used_s, other.used_s) == (5.0, 0.0)
    clock.now_s = 6.0
    loop.add_step(LONG_STEP_S / 2, holder)
    assert (holder.used_s, other.used_s) == (6.0, 1.0)


def test_time_stands_still_until_the_last_of_several_waits_is_over() -> None:
    clock = Clock()
    watch = Stopwatch(LoopClock(clock))
    clock.now_s = 1.0
    watch.pause()
    watch.pause()
    clock.now_s = 10.0
    watch.resume()
    clock.now_s = 20.0
    assert watch.used_s == 1.0
    watch.resume()
    clock.now_s = 22.0
    assert watch.used_s == 3.0


def test_an_episode_that_has_ended_has_no_progress() -> None:
    """So two that fail at once end a call by the error of the first."""
    tasks = EpisodeTasks("play", SimpleNamespace(), itertools.count())  # type: ignore[arg-type]
    assert tasks.progress(7, {}) == b""
