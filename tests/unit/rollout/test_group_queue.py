"""Order, staleness, surplus and tail of the groups between submission and training."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.controller.pending import Pending
from spmd_rl.errors import ConfigError, ContractError, SpmdError
from spmd_rl.rollout.group_queue import NO_SAMPLES, GroupQueue, QueuedGroup, TakenGroups
from spmd_rl.rollout.sampler_config import SamplerConfig
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

PER_STEP = 3
RUNS: Pending[Group] = Pending(lambda deadline_s: Group(prompt(0), []))
CONFIGS = st.builds(
    SamplerConfig,
    max_lag=st.integers(0, 3),
    max_running=st.sampled_from([0, 1, 4]),
    oversample=st.sampled_from([1.0, 1.5, 3.0]),
    tail=st.just("keep"),
    max_gen_batches=st.just(0),
)


def prompt(uid: int) -> Prompt:
    return Prompt(uid, np.zeros(1, np.int32))


@dataclass
class World:
    """A trainer, an engine and a data set around one queue, which act in a random order."""

    cfg: SamplerConfig
    seed: int
    rejects: float = 0.3
    queue: GroupQueue = field(init=False)
    steps: list[list[int]] = field(default_factory=list)  # the uids that each step learned from
    lags: list[int] = field(default_factory=list)  # of the oldest token of each group learned from
    surplus: list[int] = field(default_factory=list)
    rejected: int = 0
    began: dict[int, int] = field(default_factory=dict)  # uid to the version of its first token
    given_back: list[int] = field(default_factory=list)
    drawn: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.queue = GroupQueue(self.cfg, PER_STEP)

    def run(self, num_steps: int) -> World:
        self.queue.set_version(0)
        while len(self.steps) < num_steps:
            self.submit()
            assert self.queue.num_running <= (self.cfg.max_running or 999)
            self.random.choice([self.end_one, self.end_one, self.learn, self.restart])()
        return self

    def submit(self) -> None:
        num_prompts = self.queue.num_to_submit()
        again, self.given_back = self.given_back[:num_prompts], self.given_back[num_prompts:]
        fresh = range(self.drawn, self.drawn + num_prompts - len(again))
        self.drawn += len(fresh)
        self.queue.submit([prompt(uid) for uid in (*again, *fresh)])
        for entry in self.queue.to_start():
            self.queue.start(entry, RUNS)
            self.began.setdefault(entry.prompt.uid, self.version)

    @property
    def version(self) -> int:
        assert self.queue.version is not None
        return self.queue.version

    def end_one(self) -> None:
        running = [entry for entry in self.queue.entries if entry.call is not None]
        if running:
            entry = self.random.choice(running)
            is_rejected = random.Random(f"{self.seed} {entry.prompt.uid}").random() < self.rejects
            self.queue.end(entry, Group(entry.prompt, []), "dull" * is_rejected)

    def learn(self) -> None:
        """Take a step's groups if they are there; then the next version is pushed, at once or after
        another step of the engine.
        """
        step = len(self.steps)
        if self.version < step:
            self.queue.set_version(step)
        elif (taken := self.queue.take(step)) is not None:
            self.note(taken, step)
            if self.random.random() < 0.7:
                self.queue.set_version(step + 1)

    def note(self, taken: TakenGroups, step: int) -> None:
        uids = [group.prompt.uid for group in taken.groups]
        self.steps.append(uids)
        self.lags += [step - self.began[uid] for uid in uids]
        self.rejected += taken.rejected.total()
        back = [entry.prompt.uid for entry in taken.surplus]
        self.surplus += back
        self.given_back = sorted(self.given_back + back)
        for uid in back:
            self.began.pop(uid, None)

    def restart(self) -> None:
        """Go on from a checkpoint: what ran was aborted, and is there again as a partial answer."""
        kept = [
            QueuedGroup(entry.prompt, entry.version, group=entry.group, rejection=entry.rejection)
            for entry in self.queue.entries
        ]
        next_step, version = self.queue.next_step, self.version
        self.queue = GroupQueue(self.cfg, PER_STEP)
        self.queue.restore(kept)
        self.queue.next_step = next_step
        self.queue.set_version(version)


@settings(max_examples=80, deadline=None)
@given(CONFIGS, st.sampled_from([0.0, 0.3, 0.8]), st.integers(0, 10_000))
def test_no_token_is_too_old_and_no_prompt_is_lost_or_repeated(
    cfg: SamplerConfig, rejects: float, seed: int
) -> None:
    world = World(cfg, seed, rejects).run(12)
    learned = [uid for step in world.steps for uid in step]
    assert max(world.lags) <= cfg.max_lag
    assert {len(step) for step in world.steps} == {PER_STEP}
    if cfg.oversample == 1:
        assert world.surplus == []
        assert learned == sorted(learned), "steps learn in the order of submission"
    assert len(learned) == len(set(learned))
    queued = [entry.prompt.uid for entry in world.queue.entries]
    assert not {*learned} & {*queued, *world.given_back}
    num_gone = world.drawn - len(learned) - len(queued) - len(world.given_back)
    assert num_gone == world.rejected


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3), st.sampled_from([1.5, 3.0]), st.integers(0, 10_000))
def test_a_tail_that_is_aborted_keeps_the_bound(max_lag: int, oversample: float, seed: int) -> None:
    cfg = SamplerConfig(max_lag, oversample=oversample, tail="abort", max_gen_batches=0)
    assert max(World(cfg, seed).run(12).lags) <= max_lag


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([1.0, 1.5, 3.0]), st.integers(0, 10_000), st.integers(0, 10_000))
def test_without_lag_the_order_of_completion_changes_nothing(
    oversample: float, one: int, other: int
) -> None:
    """Which prompts a step learns from depends on the verdicts alone, not on their time."""
    cfg = SamplerConfig(oversample=oversample, max_gen_batches=0)
    worlds = [World(cfg, seed=7), World(cfg, seed=7)]
    for world, seed in zip(worlds, (one, other), strict=True):
        world.random = random.Random(seed)
        world.run(8)
    assert worlds[0].steps == worlds[1].steps


def test_the_bound_is_needed() -> None:
    """Negative control: with a larger bound, some token is older than the smaller one allows."""
    worlds = [World(SamplerConfig(2, max_gen_batches=0), seed).run(12) for seed in range(20)]
    assert max(max(world.lags) for world in worlds) == 2


def ended(cfg: SamplerConfig, *rejections: str | None) -> GroupQueue:
    """A queue under version 0 whose entries have ended: None runs, "" is accepted."""
    queue = GroupQueue(cfg, PER_STEP)
    queue.set_version(0)
    queue.submit([prompt(uid) for uid in range(len(rejections))])
    for entry, rejection in zip(queue.to_start(), rejections, strict=True):
        queue.start(entry, RUNS)
        if rejection is not None:
            queue.end(entry, Group(entry.prompt, []), rejection)
    return queue


def at_step(queue: GroupQueue, step: int) -> GroupQueue:
    queue.set_version(step)
    return queue


def failed_group(uid: int, error: str) -> Group:
    nothing = np.zeros(0, np.int32)
    sample = Sample(uid, 0, nothing, nothing.astype(np.float32), nothing, "failed")
    return Group(prompt(uid), [], [sample.replace(metadata={"error": error})])


def uids(groups: list[Group]) -> list[int]:
    return [group.prompt.uid for group in groups]


def test_a_step_waits_for_its_tail_or_passes_it_over() -> None:
    outcomes = ("", None, "", "dull", "", None)
    assert ended(SamplerConfig(1), *outcomes).take(0) is None
    queue = ended(SamplerConfig(1, tail="abort"), *outcomes)
    taken = queue.take(0)
    assert taken is not None
    assert uids(taken.groups) == [0, 2, 4]
    assert taken.rejected == {"dull": 1}
    assert taken.surplus == []
    assert [entry.prompt.uid for entry in queue.entries] == [1, 5], "they go on, until step 1"
    assert queue.num_running == 2


def test_what_is_too_many_or_too_old_leaves() -> None:
    cfg = SamplerConfig(oversample=2)
    taken = ended(cfg, "", "", "", "", "dull", None).take(0)
    assert taken is not None
    assert uids(taken.groups) == [0, 1, 2]
    assert [entry.prompt.uid for entry in taken.surplus] == [3, 5]
    assert taken.rejected == {"dull": 1}, "its prompt is not generated again"


def test_what_a_later_step_may_take_stays_though_it_was_rejected() -> None:
    queue = ended(SamplerConfig(1, oversample=2), "", "", "", "dull", "", "long")
    taken = queue.take(0)
    assert taken is not None
    assert not taken.rejected
    assert not taken.surplus
    assert [entry.prompt.uid for entry in queue.entries] == [3, 4, 5]
    assert queue.num_to_submit() == 5, "6 in all, less one that is not rejected"


def test_what_has_left_does_not_start() -> None:
    queue = GroupQueue(SamplerConfig(oversample=2, tail="abort"), PER_STEP)
    queue.restore([QueuedGroup(prompt(uid), 0) for uid in range(6)])
    queue.set_version(0)
    for entry in queue.to_start()[:3]:
        queue.start(entry, RUNS)
        queue.end(entry, Group(entry.prompt, []))
    taken = queue.take(0)
    assert taken is not None
    assert [entry.prompt.uid for entry in taken.surplus] == [3, 4, 5]
    assert queue.to_start() == []


def test_samples_that_failed_leave_with_their_rejected_groups() -> None:
    queue = ended(SamplerConfig(), *[None] * 4)
    first, *others = queue.entries
    queue.end(first, failed_group(0, "grader down"), NO_SAMPLES)
    for entry in others:
        queue.end(entry, Group(entry.prompt, []))
    taken = queue.take(0)
    assert taken is not None
    assert taken.rejected == {NO_SAMPLES: 1}
    ((group,), ((sample,),)) = taken.failed, [group.failed for group in taken.failed]
    assert group.prompt.uid == 0
    assert sample.metadata["error"] == "grader down"


@pytest.mark.parametrize("max_gen_batches", [1, 0])
def test_a_function_that_always_fails_is_named(max_gen_batches: int) -> None:
    num_groups = (max_gen_batches or 20) * PER_STEP
    queue = ended(SamplerConfig(max_gen_batches=max_gen_batches), *[None] * num_groups)
    for entry in queue.entries:
        assert queue.take(0) is None
        queue.end(entry, failed_group(entry.prompt.uid, "reward x.py:f: grader down"), NO_SAMPLES)
    with pytest.raises(SpmdError, match=r"by no_samples rejected\): reward x.py:f: grader down$"):
        queue.take(0)


def test_room_grows_with_the_version_and_shrinks_with_the_queue() -> None:
    queue = GroupQueue(SamplerConfig(1, oversample=1.5), PER_STEP)
    assert queue.num_to_submit() == 0, "nothing is pushed yet"
    queue.set_version(0)
    assert queue.num_to_submit() == 9
    queue.submit([prompt(uid) for uid in range(9)])
    assert queue.num_to_submit() == 0
    queue.set_version(1)
    assert queue.num_to_submit() == 5  # 13.5 groups, rounded up, less 9


def test_a_step_that_no_push_can_serve_is_refused() -> None:
    queue = GroupQueue(SamplerConfig(1), PER_STEP)
    with pytest.raises(ContractError, match="nothing was pushed last, and max_lag is 1"):
        queue.take(0)
    queue.set_version(3)
    with pytest.raises(ContractError, match="version 5 of the trainer: version 3 was pushed last"):
        queue.take(5)
    with pytest.raises(ContractError, match="from version 3 back to 2"):
        queue.set_version(2)


def test_a_filter_that_rejects_too_much_ends_the_run() -> None:
    cfg = SamplerConfig(max_gen_batches=2)
    assert ended(cfg, "", "dull", "dull", "long", "dull").take(0) is None
    with pytest.raises(
        SpmdError,
        match=r"step 1 needs 3 groups, but of 6 only 1 were accepted \(4 by dull, 1 by long reject",
    ):
        ended(cfg, "", "dull", "dull", "long", "dull", "dull").take(0)
    assert ended(SamplerConfig(max_gen_batches=0), *["dull"] * 9).take(0) is None


def test_a_step_that_lacks_groups_takes_none_and_gives_all_prompts_back() -> None:
    cfg = SamplerConfig(max_gen_batches=2)
    queue = at_step(ended(cfg, "", "dull", "dull", "long", "dull", "dull", None), 1)
    for entry in queue.entries[1:6]:
        entry.rewards = [1.0, 0.5]
    taken = queue.take(1)
    assert taken is not None
    assert (taken.groups, taken.rejected) == ([], {"dull": 4, "long": 1})
    assert [entry.prompt.uid for entry in taken.surplus] == [*range(7)]
    assert (queue.entries, queue.num_running, queue.next_step) == ([], 0, 1)
    assert taken.shortage == (
        "step 2 needs 3 groups, but of 6 only 1 were accepted (4 by dull, 1 by long rejected, with "
        "a mean reward of 0.75)"
    )


def test_a_step_may_take_the_groups_that_there_are() -> None:
    cfg = SamplerConfig(max_gen_batches=2, when_short="train")
    outcomes = ("dull", "", "dull", "dull", "", "dull", "", "dull", None)
    queue = at_step(ended(cfg, *outcomes), 1)
    taken = queue.take(1)
    assert taken is not None
    assert uids(taken.groups) == [1, 4], "no step looks at more than six groups"
    assert taken.rejected == {"dull": 5}, "the seventh is too old, and leaves too"
    assert [entry.prompt.uid for entry in taken.surplus] == [6, 8]
    assert (queue.num_missing(taken), queue.next_step) == (1, 2)
    assert taken.shortage.startswith("step 2 needs 3 groups, but of 6 only 2 were accepted")
    nothing = at_step(ended(cfg, *["dull"] * 6), 1).take(1)
    assert nothing is not None
    assert (nothing.groups, len(nothing.surplus)) == ([], 6), "there is none to learn from"


def test_what_a_later_step_may_take_outlives_a_step_that_lacks_groups() -> None:
    cfg = SamplerConfig(1, max_gen_batches=1, when_short="train")
    queue = at_step(ended(cfg, "dull", "", "dull", "", "dull", None), 1)
    queue.entries[3].version = queue.entries[4].version = queue.entries[5].version = 1
    taken = queue.take(1)
    assert taken is not None
    assert (uids(taken.groups), taken.rejected, taken.surplus) == ([1], {"dull": 2}, [])
    assert [entry.prompt.uid for entry in queue.entries] == [3, 4, 5]


@pytest.mark.parametrize(
    ("when_short", "step", "num_failed"), [("error", 1, 0), ("stop", 0, 0), ("stop", 1, 4)]
)
def test_a_shortage_is_an_error(when_short: Any, step: int, num_failed: int) -> None:
    """It is where the settings say so, in the first step, and where most groups have failed."""
    cfg = SamplerConfig(max_gen_batches=2, when_short=when_short)
    reasons = [*[NO_SAMPLES] * num_failed, *["dull"] * (6 - num_failed)]
    with pytest.raises(SpmdError, match="step . needs 3 groups, but of 6 only 0 were accepted"):
        at_step(ended(cfg, *reasons), step).take(step)


@pytest.mark.parametrize("num_failed", [0, 3])
def test_a_shortage_is_no_error_where_few_groups_have_failed(num_failed: int) -> None:
    reasons = [*[NO_SAMPLES] * num_failed, *["dull"] * (6 - num_failed)]
    taken = at_step(ended(SamplerConfig(max_gen_batches=2), *reasons), 1).take(1)
    assert taken is not None and not taken.groups


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3), st.sampled_from([1.0, 2.0]), st.integers(0, 10_000))
def test_steps_that_lack_groups_keep_the_bound(max_lag: int, oversample: float, seed: int) -> None:
    cfg = SamplerConfig(max_lag, oversample=oversample, max_gen_batches=1, when_short="train")
    world = World(cfg, seed, rejects=0.5)
    try:
        world.run(12)
    except SpmdError:  # in the first step
        return
    assert max(world.lags, default=0) <= max_lag
    assert len({uid for step in world.steps for uid in step}) == sum(map(len, world.steps))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_lag": -1}, "max_lag = -1: expected 0 or more"),
        ({"oversample": 0.5}, "oversample = 0.5: expected 1 or more"),
        ({"tail": "abort"}, "tail = 'abort': expected \"keep\" with max_lag = 0 and oversample"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplerConfig(**settings)
