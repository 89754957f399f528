"""Samples of episodes: which a trainer can take, and how one is cut that is too long."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from spmd_rl.errors import DataError
from spmd_rl.hooks.context import CallInfo
from spmd_rl.hooks.rank.pool import HookPool
from spmd_rl.hooks.rank.tasks import EngineCall, EpisodeEnded, Failed
from spmd_rl.hooks.results import BadResult
from spmd_rl.hooks.transcript import TurnLimits
from spmd_rl.rollout.engine import EVALUATION, SamplingConfig
from spmd_rl.rollout.episode_samples import ModelLimits
from spmd_rl.rollout.episodes import RunningEpisodes
from spmd_rl.rollout.open_group import OpenGroup
from spmd_rl.rollout.waiting_queue import WaitingQueue
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import NO_VERSION, Sample
from spmd_rl.types.token_data import TokenData

LIMITS = ModelLimits(context_tokens=8, vocab_size=10)
PROMPT = Prompt(7, np.array([1, 2], np.int32), text="37+48=")
DRAWN, SEEN = 0, NO_VERSION


def made(versions: list[int], **values: Any) -> Sample:
    length = len(versions)
    tokens = np.arange(length, dtype=np.int32)
    logprobs = np.zeros(length, np.float32)
    sample = Sample(7, 0, tokens, logprobs, np.array(versions, np.int32), "completed")
    return sample.replace(**values) if values else sample


def test_what_fits_is_left_as_it_is() -> None:
    sample = made([DRAWN, SEEN, DRAWN, SEEN, SEEN, SEEN])
    assert LIMITS.fitted(sample, 2) is sample


def test_what_was_observed_last_is_cut_off_a_sample_that_is_too_long() -> None:
    kept = b"\x05\0" + b"\0" + b"\x07\0" + b"\0" * 7
    mask = np.array([True, False, True] + [False] * 7)
    sample = made([DRAWN, SEEN, DRAWN] + [SEEN] * 7, kept=kept, mask=mask)
    cut = LIMITS.fitted(sample, 2)
    assert cut.tokens.tolist() == [0, 1, 2]
    assert cut.versions.tolist() == [DRAWN, SEEN, DRAWN]
    assert cut.logprobs.tolist() == [0, 0, 0]
    assert cut.mask.tolist() == [True, False, True]
    assert cut.kept == b"\x05\0" + b"\0" + b"\x07\0"


@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        (made([SEEN] * 7), "7 tokens after a prompt of 2, but the model's context is 8"),
        (made([DRAWN] + [SEEN] * 8 + [DRAWN]), "10 tokens after a prompt of 2"),
        (made([DRAWN], tokens=np.array([10], np.int32)), "outside the model's vocabulary of 10"),
        (made([DRAWN], tokens=np.array([-1], np.int32)), "outside the model's vocabulary of 10"),
        (made([DRAWN, SEEN], kept=b"\0"), "no kept set for each token"),
        (made([DRAWN], temperature=0.0), "temperature 0"),
        (made([DRAWN], temperature=float("nan")), "temperature nan"),
        (made([DRAWN], reward=float("-inf")), "reward is -inf"),
    ],
)
def test_what_no_trainer_can_take_is_refused(sample: Sample, problem: str) -> None:
    with pytest.raises(BadResult, match=problem):
        LIMITS.fitted(sample, 2)


class Pool:
    """A pool whose only episode is task 5."""

    def __init__(self) -> None:
        self.refused: list[str] = []

    def submit(self, task: object) -> int:
        return 5

    def refuse(self, task_id: int, call_id: int, problem: str) -> None:
        self.refused.append(problem)


@pytest.fixture
def begun() -> Callable[[bool], tuple[RunningEpisodes, OpenGroup, Pool]]:
    def begin(raises: bool) -> tuple[RunningEpisodes, OpenGroup, Pool]:
        pool = Pool()
        episodes = RunningEpisodes(cast(HookPool, pool), LIMITS, raises=raises)
        sampling = SamplingConfig(num_samples=2, max_tokens=4)
        group = OpenGroup(PROMPT, sampling, 0, CallInfo(), lambda group: None)
        episodes.start(group, 0)
        return episodes, group, pool

    return begin


def test_a_sample_that_cannot_be_taken_fails_alone(begun: Any) -> None:
    where = "generate play on prompt 7 sample 0"
    ended = EpisodeEnded(5, [made([DRAWN]), made([DRAWN] * 7, index=2)], 0.1, where)
    episodes, group, _ = begun(False)
    group, samples, _ = episodes.take(ended)
    assert [sample.index for sample in samples] == [0]
    (failed,) = group.failed
    assert (failed.index, failed.status) == (2, "failed")
    assert failed.metadata["error"].startswith(f"{where}: returned a sample of 7 tokens")
    episodes, *_ = begun(True)
    with pytest.raises(DataError, match="generate play on prompt 7 sample 0: returned a sample"):
        episodes.take(ended)


def test_an_episode_is_told_of_ids_that_the_engine_has_not(begun: Any) -> None:
    episodes, _, pool = begun(False)
    nothing = np.zeros(1, np.float32)
    tokens, versions = np.array([10], np.int32), np.array([NO_VERSION], np.int32)
    call = EngineCall(5, 1, 0, TokenData(tokens, nothing, versions), None, None)
    assert episodes.request_of(call) is None
    assert pool.refused == ["the transcript has token ids outside the model's vocabulary of 10"]


def test_turns_begin_in_the_order_of_their_groups() -> None:
    """A later turn goes before the first one of a younger group, and after an evaluation."""
    ids = iter(range(9))
    pool = SimpleNamespace(submit=lambda task: next(ids), reply=lambda *told: None)
    episodes = RunningEpisodes(cast(HookPool, pool), LIMITS, raises=False)
    sampling = SamplingConfig(num_samples=3, max_tokens=4)
    for number, info in enumerate([CallInfo(), CallInfo(), CallInfo(evaluation=True)]):
        episodes.start(OpenGroup(PROMPT, sampling, 0, info, print, number=number), number)
    queue = WaitingQueue()
    for task, transcript in ((1, 0), (0, 0), (2, 0), (0, 1)):
        asked = EngineCall(task, transcript, transcript, TokenData(), TurnLimits(), None)
        request = episodes.request_of(asked)
        assert request is not None
        queue.append(request)
    assert [one.index for one in queue] == [2, 0, 3, 1]
    assert queue.first.priority == EVALUATION


def test_where_the_episodes_are_is_counted() -> None:
    ids = iter(range(9))
    pool = SimpleNamespace(submit=lambda task: next(ids), reply=lambda *told: None)
    episodes = RunningEpisodes(cast(HookPool, pool), LIMITS, raises=False)
    group = OpenGroup(PROMPT, SamplingConfig(num_samples=4, max_tokens=4), 0, CallInfo(), print)
    zeros = {"episodes/drawing": 0, "episodes/outside": 0}
    assert episodes.live_counts() == zeros
    for index in range(4):
        episodes.start(group, index)
    assert episodes.live_counts() == zeros | {"episodes/outside": 4}
    for transcript in range(2):  # two agents of one episode draw at once
        asked = EngineCall(0, transcript, transcript, TokenData(), TurnLimits(), None)
        assert episodes.request_of(asked) is not None
    assert episodes.live_counts() == {"episodes/drawing": 1, "episodes/outside": 3}
    episodes.take(Failed(1, "play", "broke", kind="tool"))
    episodes.take(Failed(2, "play", "broke"))
    episodes.take(EpisodeEnded(0, [made([DRAWN])], 0.1, "play"))
    ended = {"episodes/failed/tool": 1, "episodes/failed/error": 1, "episodes/done": 1}
    assert episodes.live_counts() == {"episodes/drawing": 0, "episodes/outside": 1} | ended
    episodes.take(EpisodeEnded(3, [made([DRAWN], index=3)], 0.1, "play"))
    assert episodes.live_counts() == zeros | ended | {"episodes/done": 2}
    episodes.start(group, 0)
    assert episodes.live_counts() == zeros | {"episodes/outside": 1}, "the next batch has begun"
