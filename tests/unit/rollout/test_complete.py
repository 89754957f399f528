"""Requests of one prompt: aborts, answers that go on, snapshots, and episodes."""

from __future__ import annotations

import select
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spmd_rl.algo.group_metrics import group_metrics
from spmd_rl.errors import ContractError, DataError, SpmdError
from spmd_rl.hooks.config import HookConfig
from spmd_rl.observe.timeline import read_spans
from spmd_rl.observe.trace import Trace
from spmd_rl.rollout.engine import SamplingConfig
from spmd_rl.rollout.episodes import PROGRESS
from spmd_rl.rollout.group_queue import QueuedGroup
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.rollout import Rollout
from spmd_rl.rollout.sampler_file import SamplerState, read_state, write_state
from tests.unit.rollout.pumped import answer_of, generated
from tests.unit.rollout.test_rollout import REWARDS, Seat, folder, new_role, prompts

__all__ = ["folder", "new_role"]  # fixtures

LONG = SamplingConfig(num_samples=3, max_tokens=30, ignore_eos=True)


def bits(group):
    return [(one.index, one.tokens.tolist(), one.logprobs.tobytes()) for one in group.samples]


def pump_until(role, has_come) -> None:
    while not has_come():
        role.pump()


def test_an_aborted_answer_goes_on_where_it_was(new_role):
    role = new_role()
    asked = prompts(role, "12+3=", "4+4=")
    whole, other = generated(role, asked, LONG)
    first, second = (role.complete(prompt, LONG) for prompt in asked)
    pump_until(
        role, lambda: all(len(s.tokens) > 5 for g in role._flow.snapshots() for s in g.samples)
    )
    first.abort()
    group = first.value
    assert [sample.status for sample in group.samples] == ["aborted"] * 3
    assert all(0 < len(sample.tokens) < 30 for sample in group.samples)
    assert all(len(sample.text) > 0 for sample in group.samples)
    rest = answer_of(role, role.complete(asked[0], LONG, partial=group.samples))
    assert bits(rest) == bits(whole)
    assert bits(answer_of(role, second)) == bits(other)


def test_finished_samples_of_a_partial_answer_are_kept(new_role):
    role = new_role(reward="count_zeros")
    (asked,) = prompts(role, "12+3=")
    whole = generated(role, [asked], LONG)[0]
    kept = [whole.samples[1].replace(reward=7.0), whole.samples[2].replace(reward=float("nan"))]
    group = answer_of(role, role.complete(asked, LONG, partial=kept))
    assert bits(group) == bits(whole)
    rewards = [sample.reward for sample in whole.samples]
    assert [sample.reward for sample in group.samples] == [rewards[0], 7.0, rewards[2]]


def test_snapshots_disturb_nothing(new_role):
    role = new_role()
    (asked,) = prompts(role, "12+3=")
    whole = generated(role, [asked], LONG)[0]
    call, seen = role.complete(asked, LONG), []
    while not call.is_answered:
        role.pump()
        seen += role._flow.snapshots()
    assert bits(call.value) == bits(whole)
    assert role._flow.snapshots() == []
    for group in seen:
        for sample, final in zip(group.samples, whole.samples, strict=True):
            assert sample.status == "aborted"
            assert sample.tokens.tolist() == final.tokens[: len(sample.tokens)].tolist()
    lengths = [len(group.samples[0].tokens) for group in seen]
    assert lengths == sorted(lengths)
    assert max(lengths) > min(lengths)


def test_samples_may_be_asked_for_in_parts(new_role):
    role = new_role()
    (asked,) = prompts(role, "12+3=")
    whole = generated(role, [asked], LONG)[0]
    two = SamplingConfig(num_samples=2, max_tokens=30, ignore_eos=True)
    one = SamplingConfig(num_samples=1, max_tokens=30, ignore_eos=True)
    late, early = role.complete(asked, one, index=2), role.complete(asked, two)
    assert bits(answer_of(role, early)) + bits(answer_of(role, late)) == bits(whole)


def test_a_request_that_is_refused_disturbs_no_other(new_role):
    role = new_role()
    asked = prompts(role, "12+3=", "4+4=")
    whole = generated(role, asked[:1], LONG)[0]
    call = role.complete(asked[0], LONG)
    too_long = asked[1].replace(tokens=np.full(5000, 3, np.int32))
    with pytest.raises(DataError, match="context"):
        role.complete(too_long, LONG)
    with pytest.raises(SpmdError, match="in the engine already"):
        role.complete(asked[0], LONG)
    assert bits(answer_of(role, call)) == bits(whole)


EPISODE = HookConfig(generate="tests.unit.rollout.rewards:two_turns", processes=1)


def test_an_episode_of_two_turns(new_role):
    """Its first turn is what the engine draws alone; observed tokens are masked."""
    role = new_role(hooks=EPISODE, reward="noted")
    (asked,) = prompts(role, "12+3=")
    sampling = SamplingConfig(num_samples=3, max_tokens=8, ignore_eos=True)
    plain = generated(new_role(), [asked], sampling)[0]
    group = answer_of(role, role.complete(asked, sampling))
    observed = role.tokenizer(["77"], add_special_tokens=False)["input_ids"][0]
    for sample, alone in zip(group.samples, plain.samples, strict=True):
        assert sample.tokens[:4].tolist() == alone.tokens[:4].tolist()
        assert sample.logprobs[:4].tobytes() == alone.logprobs[:4].tobytes()
        assert sample.tokens[4:6].tolist() == observed
        assert sample.mask.tolist() == [True] * 4 + [False] * 2 + [True] * 8
        assert sample.versions[4:6].tolist() == [-1, -1]
        assert sample.logprobs[4:6].tolist() == [0, 0]
        assert sample.text == role._text_of(sample.tokens.tolist())
        assert np.isfinite(sample.reward)
        assert sample.metadata["metrics"] == {"turns": 2.0}
        assert sample.metadata["notes"] == {"tool": "77", "grader": "v1"}


def test_an_episode_that_is_aborted_at_once_begins_again(new_role):
    role = new_role(hooks=EPISODE)
    (asked,) = prompts(role, "12+3=")
    sampling = SamplingConfig(num_samples=2, max_tokens=8, ignore_eos=True)
    whole = answer_of(role, role.complete(asked, sampling))
    call = role.complete(asked, sampling)
    call.abort()
    assert [(one.status, len(one.tokens)) for one in call.value.samples] == [("aborted", 0)] * 2
    again = answer_of(role, role.complete(asked, sampling, partial=call.value.samples))
    assert bits(again) == bits(whole)
    assert not role.engine.has_work


def episode(name: str) -> HookConfig:
    return HookConfig(generate=f"tests.unit.rollout.rewards:{name}", processes=1)


@pytest.mark.parametrize("reward", ["slow", "slow rank_of_length"])
def test_what_an_episode_gives_is_graded_unless_it_is_an_error(new_role, reward: str) -> None:
    """Functions of a whole group do not see the sample with the error."""
    role = new_role(hooks=episode("gives_rewards"), reward=reward)
    (asked,) = prompts(role, "12+3=")
    sampling = SamplingConfig(num_samples=3, max_tokens=8, ignore_eos=True)
    given, error, plain = answer_of(role, role.complete(asked, sampling)).samples
    ranks = [0.0, 1.0] if "rank" in reward else [0.0, 0.0]
    assert [given.reward, plain.reward] == [1.0 + ranks[0], 1.0 + ranks[1]]
    assert given.metadata["given"] == {"kind": 3.0, "reward": 0.25}
    assert (error.reward, error.parts) == (0.0, {})


def test_a_context_of_its_own_is_drawn_after_as_a_prompt_is(new_role):
    role = new_role(hooks=episode("two_contexts"))
    (asked,) = prompts(role, "12+3=")
    sampling = SamplingConfig(num_samples=1, max_tokens=8, ignore_eos=True)
    plain, own = answer_of(role, role.complete(asked, sampling)).samples
    (context,) = role.tokenizer(["7+77="], add_special_tokens=False)["input_ids"]
    assert (own.context.tolist(), len(plain.context)) == (context, 0)
    assert own.metadata["metrics"]["runs"] == 8, "tokens are seen as they are drawn"
    both = replace(sampling, num_samples=2)
    others = [asked, asked.replace(tokens=np.array(context, np.int32))]
    for sample, prompt, index in zip((plain, own), others, (0, 1), strict=True):
        alone = generated(new_role(), [prompt], both)[0].samples[index]
        assert sample.tokens.tolist() == alone.tokens.tolist()
        assert sample.logprobs.tobytes() == alone.logprobs.tobytes()


def test_the_engine_stops_drawing_a_turn_that_is_given_up(new_role):
    role = new_role(hooks=episode("hangs_up"))
    (asked,) = prompts(role, "12+3=")
    sampling = SamplingConfig(num_samples=1, max_tokens=8, ignore_eos=True)
    drawing = role.complete(asked, sampling)
    while not drawing.is_answered:
        select.select(role.watched(), [], [], 0.25)  # the hook has time to give the turn up
        role.pump()
    (sample,) = drawing.value.samples
    assert len(sample.tokens) == 2
    assert not role.engine.has_work
    assert role.engine.stats()["num_generated_tokens"] < 100


@pytest.mark.parametrize("num_drawn", [3, 8, 13, 20, 31])
def test_an_aborted_episode_goes_on_from_what_it_has_drawn(new_role, tmp_path, num_drawn: int):
    """A sampler's file keeps it, too. Nothing is drawn twice, and no tool is asked again."""
    role = new_role(hooks=episode("three_turns"))
    (asked,) = prompts(role, "12+3=")
    sampling = SamplingConfig(num_samples=1, max_tokens=8, ignore_eos=True)
    call = role.complete(asked, sampling)
    pump_until_drawn(role, num_drawn)
    (seen,) = role.partials().value
    call.abort()
    assert not role.engine.has_work
    (unfinished,) = call.value.samples
    assert (unfinished.status, len(unfinished.tokens)) == ("aborted", 0)
    assert unfinished.metadata == seen.samples[0].metadata, "a snapshot is what an abort returns"
    entries = [QueuedGroup(asked, 0, partial=[unfinished])]
    write_state(str(tmp_path / "sampler"), SamplerState(1, entries, [], {}))
    (entry,) = read_state(str(tmp_path / "sampler")).entries

    samples = []
    for partial in (call.value.samples, entry.partial):
        other = new_role(hooks=episode("three_turns"))
        samples += answer_of(other, other.complete(asked, sampling, partial=partial)).samples
        assert other.engine.stats()["num_generated_tokens"] == 4 * 8 - num_drawn
        assert len(samples[-1].tokens) == 4 * 9 - 1
    num_kept = 9 * ((num_drawn - 1) // 8)
    one, two = (sample.tokens[:num_kept].tolist() for sample in samples)
    assert one == two


def pump_until_drawn(role, num_tokens: int) -> None:
    while role.engine.stats()["num_generated_tokens"] < num_tokens:
        role.pump()


def test_a_progress_that_is_none_is_refused(new_role):
    role = new_role(hooks=EPISODE)
    (asked,) = prompts(role, "12+3=")
    call = role.complete(asked, LONG)
    call.abort()
    broken = [one.replace(metadata={PROGRESS: b"\x93\x01"}) for one in call.value.samples]
    with pytest.raises(ContractError, match="something else than an episode's progress"):
        role.complete(asked, LONG, partial=broken)
    assert not role.engine.has_work


class TracedSeat(Seat):
    def __init__(self, folder: Path) -> None:
        self.trace = Trace(folder, "rank 0", rank=0)


@pytest.mark.parametrize("reward", ["", "count_zeros"])
def test_a_traced_request_tells_its_times(folder, tmp_path: Path, reward: str):
    """In the metadata of its first sample, and on a lane of the trace."""
    seat, rewards = TracedSeat(tmp_path), {f"{REWARDS}:{name}": 1.0 for name in reward.split()}
    cfg, hooks = NativeEngineConfig(max_batch=2), HookConfig(processes=1)
    role = Rollout(cfg, seat, str(folder), 0, rewards, hooks)  # type: ignore[arg-type]
    asked = prompts(role, "12+3=", "4+4=")
    groups = generated(role, asked, LONG)
    role.complete(asked[0], LONG).abort()
    role.close()
    seat.trace.close()
    events = ["started", "first_token", "drawn", *(["graded"] if reward else [])]
    for group in groups:
        first, *others = group.samples
        times = first.metadata["times"]
        assert [*times] == events
        assert [*times.values()] == sorted(times.values())
        assert all(sample.metadata == {} for sample in others)
    assert groups[1].samples[0].metadata["times"]["started"] > 0, "it waited for the first"
    (_, spans) = zip(*read_spans(tmp_path / "rank_0.jsonl"), strict=True)
    stages = [span.name for span in spans if span is not None and span.args["prompt"] == 1]
    assert stages == ["queue", "prefill", "decode", "grading"][: len(events)]
    means = group_metrics(groups, 0)
    assert ("time/grading_mean" in means) == bool(reward)
    assert means["time/request_max"] >= means["time/queue_mean"] + means["time/decode_mean"]


def test_an_untraced_request_has_no_times(new_role):
    role = new_role()
    (group,) = generated(role, prompts(role, "12+3="), LONG)
    assert [sample.metadata for sample in group.samples] == [{}] * 3
    assert "time/queue_mean" not in group_metrics([group], 0)
