"""Parts of an episode: its transcript, its turns and its time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spmd_rl.hooks.child.stopwatch import LONG_STEP_S, LoopClock, Stopwatch
from spmd_rl.hooks.rank.episode_turns import EpisodeTurns
from spmd_rl.hooks.transcript import Transcript, TranscriptPlace, Turn
from spmd_rl.hooks.wire.messages import Ask
from tests.unit.hooks.cases import make_prompt


def turn(*tokens: int, status: Any = "completed", kept: bytes = b"") -> Turn:
    num = len(tokens)
    logprobs = np.full(num, -1, np.float32)
    return Turn(np.array(tokens, np.int32), logprobs, np.full(num, 2, np.int32), "", status, kept)


def ask(ask_id: int, *tokens: int, transcript: int = 0, stop: list[str] | None = None) -> Ask:
    past = turn(*tokens)
    return Ask(0, ask_id, transcript, past.tokens, past.logprobs, past.versions, b"", 4, stop)


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


def test_a_question_is_asked_once() -> None:
    turns = EpisodeTurns()
    assert turns.ask(ask(0, 1, 2), 10) is True
    assert turns.ask(ask(1, 1, 2, transcript=1), 11) is True
    assert turns.ask(ask(2, 1, 2, stop=["x"]), 12) is True
    assert turns.ask(ask(3, 1), 13) is True
    drawn = turn(7)
    assert turns.answer(10, drawn) == 0
    assert turns.ask(ask(4, 1, 2), 14) is drawn


def test_an_episode_that_starts_again_gets_the_turns_that_were_drawn() -> None:
    turns, first, second = EpisodeTurns(), turn(7), turn(8)
    turns.ask(ask(0), 10)
    turns.answer(10, first)
    turns.ask(ask(1, 7), 11)
    turns.restart()
    assert turns.ask(ask(0), 12) is first
    assert turns.ask(ask(1, 7), 13) is False, "the engine draws it already"
    assert turns.answer(11, second) == 1
    turns.restart()
    assert turns.ask(ask(5, 7), 14) is second


def test_an_answer_for_nobody_is_kept() -> None:
    turns, drawn = EpisodeTurns(), turn(7)
    turns.ask(ask(0), 10)
    turns.restart()
    assert turns.answer(10, drawn) is None
    assert turns.ask(ask(0), 11) is drawn


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
