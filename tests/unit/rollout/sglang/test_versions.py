"""Versions of tokens, and what the scheduler is never asked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from spmd_rl.errors import ResidencyError
from spmd_rl.rollout.sglang.requests import sampling_seed
from tests.unit.rollout.sglang.conftest import SglangCase, new_sglang_case

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def case(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangCase]:
    case = new_sglang_case(folder, tmp_path_factory.mktemp("site"), fake_steps=0)
    yield case
    case.engine.close()


def test_every_version_is_right_with_a_push_at_each_step(case: SglangCase) -> None:
    """A token of the fake depends on its weights and its position alone."""
    request = case.request(7, max_tokens=NUM_TOKENS)
    case.push(1)
    old = case.finish(request)[7, 0].tokens.tolist()
    case.push(2, case.other_weights)
    new = case.finish(request)[7, 0].tokens.tolist()
    assert old != new
    for steps in range(NUM_TOKENS):
        case.push(1)
        case.engine.submit(request)
        case.advance(steps)
        case.push(2, case.other_weights)
        sample = case.finish()[7, 0]
        # one that was aborted while it ran has decoded once more
        num_old = min(steps + 1, NUM_TOKENS) if steps else 0
        assert sample.versions.tolist() == [1] * num_old + [2] * (NUM_TOKENS - num_old)
        assert sample.tokens.tolist() == old[:num_old] + new[num_old:]
        assert len(sample.logprobs) == NUM_TOKENS


def test_an_abort_at_the_last_token_can_be_resumed(case: SglangCase) -> None:
    """The scheduler decodes once more, and says no more than that it aborted."""
    case.push(1)
    request = case.request(3, max_tokens=NUM_TOKENS)
    whole = case.finish(request)[3, 0].tokens.tolist()
    for stop_ids in ((), (whole[-1],)):
        stopped = case.request(3, max_tokens=NUM_TOKENS, stop_ids=stop_ids, ignore_eos=not stop_ids)
        unbroken = case.finish(stopped)[3, 0]
        for steps in range(len(unbroken.tokens)):
            case.engine.submit(stopped)
            case.advance(steps)
            (partial,) = case.engine.abort()
            resumed = case.finish(stopped.resumed(partial))[3, 0]
            assert resumed.tokens.tolist() == unbroken.tokens.tolist()
            assert resumed.status == unbroken.status


def test_sleep_while_busy_is_refused_before_the_scheduler_sees_it(case: SglangCase) -> None:
    """The fake would die of it, as SGLang does."""
    case.push(1)
    case.engine.submit(case.request(1))
    case.advance(2)
    with pytest.raises(ResidencyError, match="cannot sleep while 1 requests run"):
        case.engine.state.begin_sleep(case.engine.stats()["num_running"])
    case.engine.sleep()
    os.kill(case.engine.child.pid, 0)
    case.engine.wake()
    case.push(1)
    assert len(case.finish()[1, 0].tokens) > 0


def test_a_request_has_draws_of_its_own(case: SglangCase) -> None:
    seeds = {sampling_seed(case.request(uid, index)) for uid in range(20) for index in range(20)}
    assert len(seeds) == 400
    assert all(0 <= seed < 1 << 63 for seed in seeds)
