"""Rounds: which groups go on in later steps, in which order, and with which bits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.controller.pending import Pending
from spmd_rl.errors import ConfigError
from spmd_rl.hooks.config import HookConfig
from spmd_rl.rollout.engine import SamplingConfig
from spmd_rl.rollout.group_queue import GroupQueue, QueuedGroup
from spmd_rl.rollout.sampler_config import SamplerConfig
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample
from tests.unit.rollout.pumped import answer_of, generated
from tests.unit.rollout.test_rollout import REWARDS, folder, new_role, prompts

__all__ = ["folder", "new_role"]  # fixtures

RUNS: Pending[Group] = Pending(lambda deadline_s: Group(prompt(0), []))
LONG = SamplingConfig(num_samples=3, max_tokens=30)
FULL = replace(LONG, ignore_eos=True)


def prompt(uid: int) -> Prompt:
    return Prompt(uid, np.zeros(1, np.int32))


@dataclass
class Loop:
    """A synchronous loop around one queue, in which group `uid` ends after `rounds_of(uid)`."""

    cfg: SamplerConfig
    per_step: int
    seed: int
    restarts: bool = False
    drawn: int = 0
    steps: list[list[int]] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    num_rounds: list[int] = field(default_factory=list)  # of each step
    rejected: list[int] = field(default_factory=list)
    surplus: list[int] = field(default_factory=list)
    num_done: dict[int, int] = field(default_factory=dict)  # rounds of each group
    submitted_at: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.queue = GroupQueue(self.cfg, self.per_step)

    def rounds_of(self, uid: int) -> int:
        return Random(f"{self.seed} {uid}").choice([1, 1, 1, 2, 2, 3, 5, 9])

    def is_rejected(self, uid: int) -> bool:
        return Random(f"verdict {self.seed} {uid}").random() < 0.2

    def run(self, num_steps: int) -> Loop:
        for step in range(num_steps):
            self.queue.set_version(step)
            self.num_rounds.append(0)
            while (taken := self.queue.take(step)) is None:
                self.play_round(step)
            self.steps.append([group.prompt.uid for group in taken.groups])
            self.lags += [step - self.submitted_at[uid] for uid in self.steps[-1]]
            self.surplus += [entry.prompt.uid for entry in taken.surplus]
            if self.restarts:
                self.restart(step + 1)
        return self

    def play_round(self, step: int) -> None:
        self.num_rounds[-1] += 1
        fresh = range(self.drawn, self.drawn + self.queue.num_to_submit())
        self.drawn += len(fresh)
        self.submitted_at |= dict.fromkeys(fresh, step)
        self.queue.submit([prompt(uid) for uid in fresh])
        self.queue.begin_round()
        order = Random(f"{step} {self.restarts}")
        while self.queue.in_round:
            assert self.queue.take(step) is None, "a step waits for the end of the round"
            for entry in self.queue.to_start():
                self.queue.start(entry, RUNS)
            running = [entry for entry in self.queue.entries if entry.call is not None]
            assert len(running) <= (self.cfg.max_running or 999)
            self.end(order.choice(running))

    def end(self, entry: QueuedGroup) -> None:
        uid = entry.prompt.uid
        self.num_done[uid] = self.num_done.get(uid, 0) + 1
        if self.num_done[uid] < self.rounds_of(uid):
            self.queue.pause(entry, [unfinished(uid)])
            return
        reason = "dull" if self.is_rejected(uid) else ""
        self.rejected += [uid] if reason else []
        self.queue.end(entry, Group(entry.prompt, []), reason)

    def restart(self, next_step: int) -> None:
        """Go on from a checkpoint of the queue."""
        entries = [
            QueuedGroup(
                entry.prompt, entry.version, entry.partial, None, entry.group, entry.rejection
            )
            for entry in self.queue.entries
        ]
        self.queue = GroupQueue(self.cfg, self.per_step)
        self.queue.restore(entries)
        self.queue.next_step = next_step


def unfinished(uid: int) -> Sample:
    none = np.zeros(0, np.int32)
    return Sample(uid, 0, none, np.zeros(0, np.float32), none, "aborted")


CONFIGS = st.builds(
    SamplerConfig,
    max_lag=st.integers(1, 3),
    max_running=st.sampled_from([0, 1, 4]),
    oversample=st.sampled_from([1.25, 1.5, 2.0]),
    round_tokens=st.just(8),
    max_gen_batches=st.just(0),
)


@settings(max_examples=100, deadline=None)
@given(CONFIGS, st.integers(1, 5), st.integers(0, 10_000))
def test_every_prompt_is_learned_from_once_and_in_time(
    cfg: SamplerConfig, per_step: int, seed: int
) -> None:
    loop = Loop(cfg, per_step, seed).run(10)
    learned = [uid for step in loop.steps for uid in step]
    waiting = [entry.prompt.uid for entry in loop.queue.entries if not entry.rejection]
    assert {len(step) for step in loop.steps} == {per_step}
    assert max(loop.lags) <= cfg.max_lag
    assert loop.surplus == [], "nothing is drawn in vain"
    assert sorted(learned + waiting + loop.rejected) == [*range(loop.drawn)]
    assert all(step == sorted(step) for step in loop.steps), "the oldest come first"
    assert all(loop.num_done[uid] == loop.rounds_of(uid) for uid in learned)


@settings(max_examples=60, deadline=None)
@given(CONFIGS, st.integers(1, 4), st.integers(0, 10_000))
def test_no_order_of_ends_and_no_restart_changes_what_steps_learn_from(
    cfg: SamplerConfig, per_step: int, seed: int
) -> None:
    one = Loop(cfg, per_step, seed).run(8)
    other = Loop(replace(cfg, max_running=2), per_step, seed, restarts=True).run(8)
    assert (one.steps, one.num_rounds) == (other.steps, other.num_rounds)


def test_a_step_takes_whole_groups_and_waits_for_one_that_is_due() -> None:
    """Of three groups the first takes nine rounds: it is passed over once, and then awaited."""
    cfg = SamplerConfig(1, oversample=1.5, round_tokens=8)
    lengths = {0: 9, 1: 1, 2: 1, 3: 1, 4: 2}
    loop = Loop(cfg, 2, 0)
    loop.rounds_of = lambda uid: lengths.get(uid, 1)  # type: ignore[method-assign]
    loop.is_rejected = lambda uid: False  # type: ignore[method-assign]
    loop.run(3)
    assert loop.steps == [[1, 2], [0, 3], [4, 5]]
    assert loop.num_rounds == [1, 8, 1]
    assert loop.lags == [0, 0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"max_lag": 0}, "max_lag = 0: expected 1 or more with round_tokens"),
        ({"oversample": 1.0}, "oversample = 1.0: expected more than 1, and at most 2"),
        ({"oversample": 2.5}, "oversample = 2.5: expected more than 1, and at most 2"),
        ({"tail": "abort"}, "tail = 'abort': expected \"keep\" with round_tokens"),
        ({"round_tokens": -1}, "round_tokens = -1: expected 0 or more"),
    ],
)
def test_settings_with_which_nothing_could_go_on(wrong: dict[str, Any], sentence: str) -> None:
    good = {"max_lag": 1, "oversample": 1.5, "round_tokens": 8}
    with pytest.raises(ConfigError, match=sentence):
        SamplerConfig(**good | wrong)


def in_rounds(roles: Any, asked: Prompt, sampling: SamplingConfig, size: int) -> list[Group]:
    """Return the answers of the rounds that a prompt takes, each by another role."""
    groups: list[Group] = []
    partial: list[Sample] = []
    while not groups or any(one.status == "aborted" for one in groups[-1].samples):
        role = next(roles)
        call = role.complete(asked, sampling, partial=partial, round_tokens=size)
        groups.append(answer_of(role, call))
        assert not role.engine.has_work
        partial = [*groups[-1].samples, *groups[-1].failed]
    return groups


def bits(group: Group) -> list[Any]:
    return [
        (one.index, one.status, one.tokens.tolist(), one.logprobs.tobytes(), str(one.reward))
        for one in group.samples
    ]


@pytest.mark.parametrize("sampling", [LONG, FULL])
@pytest.mark.parametrize("size", [1, 7, 10, 30])
def test_rounds_draw_what_one_call_draws(new_role, sampling: SamplingConfig, size: int) -> None:
    role = new_role(reward="count_zeros")
    (asked,) = prompts(role, "12+3=")
    (whole,) = generated(role, [asked], sampling)
    groups = in_rounds(iter([role] * 99), asked, sampling, size)
    assert bits(groups[-1]) == bits(whole)
    longest = max(len(sample.tokens) for sample in whole.samples)
    assert len(groups) == -(-longest // size)
    for before, after in zip([Group(asked, []), *groups], groups, strict=False):
        lengths = [len(one.tokens) for one in before.samples] or [0] * 3
        grown = [len(one.tokens) for one in after.samples]
        assert all(new - old <= size for old, new in zip(lengths, grown, strict=True))


def test_a_carried_sample_keeps_the_log_probs_of_the_weights_that_drew_it(new_role) -> None:
    role = new_role()
    (asked,) = prompts(role, "12+3=")
    (whole,) = generated(role, [asked], FULL)
    first = answer_of(role, role.complete(asked, FULL, round_tokens=12))
    with torch.no_grad():
        role.engine.model.get_parameter("model.norm.weight").mul_(1.5)
    role.engine.sink().commit(5)
    second = answer_of(role, role.complete(asked, FULL, partial=first.samples, round_tokens=99))
    for old, before, after in zip(whole.samples, first.samples, second.samples, strict=True):
        assert before.status == "aborted"
        assert after.versions.tolist() == [0] * 12 + [5] * 18
        assert after.tokens[:12].tolist() == before.tokens.tolist() == old.tokens[:12].tolist()
        assert after.logprobs[:12].tobytes() == old.logprobs[:12].tobytes()
        assert after.logprobs[12:].tobytes() != old.logprobs[12:].tobytes()


def test_an_answer_that_fills_the_context_is_whole(new_role) -> None:
    """A round ends where the context does: there is nothing left to draw."""
    role = new_role()
    (asked,) = prompts(role, "12+3=")
    sampling = SamplingConfig(num_samples=1, max_tokens=1000, ignore_eos=True)
    room = 128 - len(asked.tokens)
    for size in (room, room // 2 + 1):
        *before, last = in_rounds(iter([role] * 9), asked, sampling, size)
        assert (last.samples[0].status, len(last.samples[0].tokens)) == ("truncated", room)
        assert len(before) == int(size < room)


def test_functions_of_a_whole_group_see_it_once_it_is_whole(new_role) -> None:
    """The grades of single samples that ended in an earlier round count beside theirs."""
    role = new_role(reward="count_zeros rank_of_length")
    (asked,) = prompts(role, "12+3=")
    sampling = replace(LONG, num_samples=6, max_tokens=40)
    (whole,) = generated(role, [asked], sampling)
    *before, last = in_rounds(iter([role] * 99), asked, sampling, 4)
    assert {one.status for group in before for one in group.samples} > {"aborted"}
    assert bits(last) == bits(whole)
    assert [one.parts for one in last.samples] == [one.parts for one in whole.samples]


def test_a_sample_that_failed_in_an_earlier_round_stays_failed(new_role) -> None:
    hooks = HookConfig(processes=1, on_error="fail")
    role = new_role(reward="fails_on_odd", hooks=hooks)
    (asked,) = prompts(role, "12+3=")
    sampling = replace(LONG, num_samples=6, max_tokens=40)
    *before, last = in_rounds(iter([role] * 99), asked, sampling, 4)
    assert before[-1].failed
    failed = [one.index for one in last.failed]
    assert {one.index for one in before[-1].failed} <= {*failed}
    assert sorted([*failed, *(one.index for one in last.samples)]) == [*range(6)]


def episode(name: str) -> HookConfig:
    return HookConfig(generate=f"{REWARDS}:{name}", processes=1)


@pytest.mark.parametrize("size", [5, 8, 31])
def test_an_episode_goes_on_in_another_round_from_what_it_has_drawn(new_role, size: int) -> None:
    """Four turns of 8 tokens; nothing is drawn twice, and what it was told is the same."""
    (asked,) = prompts(new_role(), "12+3=")
    sampling = SamplingConfig(num_samples=2, max_tokens=8, ignore_eos=True)
    alone = new_role(hooks=episode("told_turns"))
    whole = answer_of(alone, alone.complete(asked, sampling))
    made = [new_role(hooks=episode("told_turns")) for _ in range(2)]
    roles = iter(made * 99)
    *before, last = in_rounds(roles, asked, sampling, size)
    assert len(before) == -(-32 // size) - 1
    assert bits(last) == bits(whole)
    drawn = [role.engine.stats()["num_generated_tokens"] for role in made]
    assert sum(drawn) == 2 * 4 * 8


def test_turns_at_once_share_their_round(new_role) -> None:
    """Two conversations of an episode draw 32 tokens in all, some of them at the same time."""
    role = new_role(hooks=episode("turns_at_once"))
    (asked,) = prompts(role, "12+3=")
    sampling = SamplingConfig(num_samples=1, max_tokens=16, ignore_eos=True)
    (whole,) = generated(role, [asked], sampling)
    num_drawn = role.engine.stats()["num_generated_tokens"]
    *before, last = in_rounds(iter([role] * 99), asked, sampling, 5)
    assert len(before) >= 2
    assert bits(last) == bits(whole)
    assert role.engine.stats()["num_generated_tokens"] == 2 * num_drawn


def test_an_episode_that_has_ended_is_not_played_again(new_role) -> None:
    """Its only sample has the index of its second conversation."""
    role = new_role(hooks=episode("second_alone"))
    (asked,) = prompts(role, "12+3=")
    sampling = SamplingConfig(num_samples=2, max_tokens=16, ignore_eos=True)
    *before, last = in_rounds(iter([role] * 99), asked, sampling, 6)
    assert [(one.index, one.status) for one in before[0].samples] == [
        (1, "aborted"),
        (2, "truncated"),
    ]
    assert [(one.index, len(one.tokens)) for one in last.samples] == [(2, 4), (3, 16)]
    assert role.engine.stats()["num_generated_tokens"] == 1 + 4 + 1 + 16
