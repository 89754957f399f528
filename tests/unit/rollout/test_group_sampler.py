"""Groups of a sampler: order, refill, errors, surplus, and what a checkpoint holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from spmd_rl.controller.pending import Pending, StartedCall
from spmd_rl.errors import ConfigError, ContractError, SpmdError
from spmd_rl.rollout.engine import SamplingConfig
from spmd_rl.rollout.group_sampler import GroupSampler
from spmd_rl.rollout.sampler_config import SamplerConfig
from spmd_rl.rollout.sampler_file import GROUPS_FILE, STATE_FILE
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

LAST_RESORT_S = 60.0


class Keep(NamedTuple):
    ok: bool
    reason: str = ""


class Call(StartedCall):
    """A call that the test ends by hand."""

    def __init__(self, rollout: Rollout, prompt: Prompt, partial: list[Sample]) -> None:
        self.prompt, self.partial = prompt, partial
        self.value: Group | BaseException | None = None
        self.is_aborted = False
        self._rollout = rollout
        self._listeners: list[Callable[[], object]] = []

    @property
    def done(self) -> bool:
        return self.value is not None

    @property
    def seconds_left(self) -> float:
        return LAST_RESORT_S

    def abort(self) -> None:
        self.is_aborted = not self.done
        if self._rollout.ends_on_abort and not self.done:
            self.end(Group(self.prompt, []))

    def call_when_done(self, listener: Callable[[], object]) -> None:
        self._listeners.append(listener)

    def handle_until(self, done: Callable[[], object], seconds: float) -> bool:
        """Poll, since `CompletionQueue.wake` tells nobody."""
        with self._rollout.news:
            while not done():
                if not seconds:
                    return False
                self._rollout.news.wait(0.01)
            return True

    def end(self, value: Group | BaseException) -> None:
        with self._rollout.news:
            self.value = value
            for listener in self._listeners:
                listener()
            self._rollout.news.notify_all()

    def finish(self, deadline_s: float | None) -> Group:
        assert self.value is not None
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


class Stats:
    """Two engines, in which five samples wait."""

    def start(self) -> Pending[list[dict[str, int]]]:
        return Pending(lambda deadline_s: [{"num_waiting": 2}, {"num_waiting": 3}])


class Rollout:
    """Engines whose groups end when the test says so."""

    def __init__(self) -> None:
        self.calls: dict[int, Call] = {}  # the latest of each prompt, in the order of their start
        self.news = threading.Condition()
        self.version = 0
        self.ends_on_abort = False
        self.complete = self.partials = self
        self.stats = Stats()

    def start(
        self,
        prompt: Prompt,
        sampling: SamplingConfig,
        *,
        partial: list[Sample],
        step: int,
        round_tokens: int,
    ) -> Pending[Group]:
        with self.news:
            call = Call(self, prompt, partial)
            self.calls.pop(prompt.uid, None)
            self.calls[prompt.uid] = call
            self.news.notify_all()
        return Pending(call.finish, call)

    def call(self) -> list[Group]:
        """Half of the answer of every running group."""
        running = [call for call in self.calls.values() if not call.done]
        return [Group(call.prompt, [self.sample(call.prompt.uid, 2)]) for call in running]

    def sample(self, uid: int, num_tokens: int, version: int | None = None) -> Sample:
        tokens = np.arange(num_tokens, dtype=np.int32) + uid
        version = self.version if version is None else version
        versions = np.full(num_tokens, version, np.int32)
        return Sample(uid, 0, tokens, np.full(num_tokens, -0.5, np.float32), versions, "completed")

    def end(self, *uids: int, version: int | None = None) -> None:
        for uid in uids:
            group = Group(self.calls[uid].prompt, [self.sample(uid, 4, version)])
            self.calls[uid].end(group)

    def started(self, *uids: int) -> list[int]:
        """Wait until the calls of these prompts have started."""
        with self.news:
            assert self.news.wait_for(lambda: {*uids} <= self.calls.keys(), LAST_RESORT_S)
            return list(self.calls)


class Source:
    """Prompts numbered from 0, up to `num_prompts`."""

    def __init__(self, num_prompts: int = 1 << 30) -> None:
        self.num_prompts, self.drawn = num_prompts, 0
        self.back: list[int] = []

    def take(self, num_prompts: int) -> list[Prompt]:
        self.back += range(self.drawn, min(self.drawn + num_prompts, self.num_prompts))
        self.drawn = min(self.drawn + num_prompts, self.num_prompts)
        taken, self.back = self.back[:num_prompts], self.back[num_prompts:]
        return [Prompt(uid, np.array([uid], np.int32)) for uid in taken]

    def give_back(self, prompts: Sequence[Prompt]) -> None:
        self.back = sorted(self.back + [prompt.uid for prompt in prompts])

    def state(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "back": self.back}

    def restore(self, state: dict[str, Any]) -> None:
        self.drawn, self.back = state["drawn"], state["back"]


@pytest.fixture
def rollout() -> Rollout:
    return Rollout()


@pytest.fixture
def make(rollout: Rollout) -> Iterator[Callable[..., GroupSampler]]:
    made: list[GroupSampler] = []
    engines_of_all = [rollout]

    def sampler(
        cfg: SamplerConfig, source: Source | None = None, keep: Any = None, engines: Any = rollout
    ) -> GroupSampler:
        engines_of_all.append(engines)
        made.append(
            GroupSampler(
                engines, source or Source(), SamplingConfig(), cfg, groups_per_step=2, keep=keep
            )
        )
        return made[-1]

    yield sampler
    # so that closing ends, however the test did
    for one_rollout in engines_of_all:
        one_rollout.ends_on_abort = True
        for call in one_rollout.calls.values():
            if call.is_aborted and not call.done:
                call.end(Group(call.prompt, []))
    for one in made:
        one.close()
        assert not one._thread.is_alive()


def uids(groups: list[Group]) -> list[int]:
    return [group.prompt.uid for group in groups]


def test_groups_come_in_the_order_of_submission(make: Any, rollout: Rollout) -> None:
    sampler = make(SamplerConfig(max_lag=1))
    assert rollout.calls == {}, "the engines have no weights yet"
    sampler.set_version(0)
    assert list(rollout.calls) == [0, 1, 2, 3]
    rollout.end(3, 1, 0)
    assert uids(sampler.take(0)) == [0, 1]
    assert sampler.metrics() == {
        "rollout/running": 1,
        "rollout/waiting": 5,
        "rollout/buffered": 1,
        "rollout/surplus": 0,
        "rollout/rejected": 0,
    }
    sampler.set_version(1)
    assert list(rollout.calls) == [0, 1, 2, 3, 4, 5]
    rollout.end(2)
    assert uids(sampler.take(1)) == [2, 3]


def test_what_is_rejected_is_replaced_while_the_recipe_does_something_else(
    make: Any, rollout: Rollout
) -> None:
    def keep(group: Group) -> Keep:
        return Keep(group.prompt.uid not in (0, 3), "Too dull!")

    sampler = make(SamplerConfig(max_running=2), keep=keep)
    sampler.set_version(0)
    assert list(rollout.calls) == [0, 1]
    rollout.end(0)
    rollout.started(2)
    rollout.calls[2].end(Group(rollout.calls[2].prompt, []))
    rollout.started(3)
    rollout.end(3)
    rollout.started(4)
    rollout.end(4, 1)
    assert uids(sampler.take(0)) == [1, 4]
    assert sampler.metrics()["rollout/rejected"] == 3
    assert sampler.metrics()["rollout/rejected_too_dull"] == 2
    assert sampler.metrics()["rollout/rejected_no_samples"] == 1


def test_take_raises_what_stopped_the_thread(make: Any, rollout: Rollout) -> None:
    def keep(group: Group) -> Keep:
        raise ValueError("no such answer")

    sampler = make(SamplerConfig(), keep=keep)
    sampler.set_version(0)
    rollout.end(0)
    for _ in range(2):
        with pytest.raises(ValueError, match="no such answer"):
            sampler.take(0)


def test_an_error_of_a_call_is_raised_once_it_is_there(make: Any, rollout: Rollout) -> None:
    sampler = make(SamplerConfig())
    sampler.set_version(0)
    rollout.calls[1].end(SpmdError("the engine is out of memory"))
    with pytest.raises(SpmdError, match="out of memory"):
        sampler.take(0)


def test_surplus_goes_back_before_anything_is_submitted(make: Any, rollout: Rollout) -> None:
    source = Source()
    sampler = make(SamplerConfig(oversample=2.5), source)
    sampler.set_version(0)
    assert list(rollout.calls) == [0, 1, 2, 3, 4]
    rollout.end(0, 1, 3)
    assert uids(sampler.take(0)) == [0, 1]
    assert sampler.metrics()["rollout/surplus"] == 3
    assert [uid for uid, call in rollout.calls.items() if call.is_aborted] == [2, 4]
    old = dict(rollout.calls)
    sampler.set_version(1)
    assert rollout.calls == old, "prompts are still on their way back"
    rollout.version = 1
    rollout.end(4, 2)
    rollout.started(5, 6)
    assert list(rollout.calls) == [0, 1, 2, 3, 4, 5, 6]
    rollout.end(2, 3)
    assert uids(sampler.take(1)) == [2, 3]


def test_what_is_rejected_behind_the_last_group_is_not_generated_again(
    make: Any, rollout: Rollout, tmp_path: Path
) -> None:
    source = Source()
    sampler = make(
        SamplerConfig(oversample=2.5), source, lambda group: Keep(group.prompt.uid != 3, "dull")
    )
    sampler.set_version(0)
    rollout.end(3)
    rollout.started(5)
    rollout.end(0, 1)
    assert uids(sampler.take(0)) == [0, 1]
    assert sampler.metrics()["rollout/rejected_dull"] == 1
    assert sampler.metrics()["rollout/surplus"] == 3
    sampler.save(str(tmp_path / "sampler"))
    restored = Source()
    make(SamplerConfig(oversample=2.5), restored).load(str(tmp_path / "sampler"))
    assert restored.state() == {"drawn": 6, "back": [2, 4, 5]}


def test_what_failed_in_rejected_groups_is_handed_out(make: Any, rollout: Rollout) -> None:
    sampler = make(SamplerConfig())
    sampler.set_version(0)
    failed = rollout.sample(0, 4).replace(status="failed", metadata={"error": "grader down"})
    rollout.calls[0].end(Group(rollout.calls[0].prompt, [], [failed]))
    rollout.started(2)
    rollout.end(1, 2)
    assert uids(sampler.take(0)) == [1, 2]
    (group,) = sampler.failed_groups()
    assert (group.prompt.uid, group.samples, len(group.failed)) == (0, [], 1)
    assert group.failed[0].metadata == {"error": "grader down"}
    rollout.version = 1
    sampler.set_version(1)
    rollout.end(3, 4)
    sampler.take(1)
    assert sampler.failed_groups() == []


def test_prompts_that_run_out_because_a_function_fails(make: Any, rollout: Rollout) -> None:
    sampler = make(SamplerConfig(), Source(2))
    sampler.set_version(0)
    for uid in (0, 1):
        failed = rollout.sample(uid, 4).replace(status="failed", metadata={"error": "grader down"})
        rollout.calls[uid].end(Group(rollout.calls[uid].prompt, [], [failed]))
    with pytest.raises(SpmdError, match="no more prompts to take; .* failed: grader down"):
        sampler.take(0)


def test_prompts_that_run_out(make: Any, rollout: Rollout) -> None:
    sampler = make(SamplerConfig(), Source(1))
    sampler.set_version(0)
    rollout.end(0)
    with pytest.raises(SpmdError, match="step 1: there are no more prompts"):
        sampler.take(0)


def test_old_tokens_are_refused(make: Any, rollout: Rollout) -> None:
    sampler = make(SamplerConfig(max_lag=1))
    sampler.set_version(2)
    rollout.end(0, 1, version=1)
    assert uids(sampler.take(2)) == [0, 1]
    rollout.end(2, version=0)
    rollout.end(3, version=3)
    with pytest.raises(ContractError, match="step 4 has tokens of version 0"):
        sampler.take(3)


def test_a_checkpoint_holds_what_is_buffered_and_how_far_the_rest_is(
    make: Any, rollout: Rollout, tmp_path: Path
) -> None:
    """The second sampler, which knows only the files, hands out the same groups, and asks its
    engines to go on where the answers were.
    """
    sampler = make(SamplerConfig(2), keep=lambda group: Keep(group.prompt.uid != 1, "odd"))
    sampler.set_version(0)
    rollout.end(0, 1, 2)
    assert uids(sampler.take(0)) == [0, 2]
    rollout.started(6)
    rollout.end(4)
    sampler.save(str(tmp_path / "sampler"))
    rollout.end(3)
    others, source = Rollout(), Source()
    again = make(SamplerConfig(2), source, engines=others)
    again.load(str(tmp_path / "sampler"))
    assert source.state() == {"drawn": 7, "back": []}
    assert others.calls == {}
    others.version = 1
    again.set_version(1)
    assert list(others.calls) == [3, 5, 6, 7, 8]
    assert [len(call.partial) for call in others.calls.values()] == [1, 1, 1, 0, 0]
    (partial,) = others.calls[3].partial
    assert partial.tokens.tolist() == [3, 4]
    others.end(3, version=0)
    one, two = again.take(1)
    assert (one.prompt.uid, two.prompt.uid) == (3, 4)
    assert two.samples[0].tokens.tolist() == [4, 5, 6, 7]
    assert two.samples[0].versions.tolist() == [0] * 4
    others.end(5, version=0)
    others.end(6, 7, 8)
    again.set_version(2)
    assert uids(again.take(2)) == [5, 6]


def test_prompts_on_their_way_back_are_in_the_checkpoint(
    make: Any, rollout: Rollout, tmp_path: Path
) -> None:
    cfg = SamplerConfig(oversample=2)
    sampler = make(cfg)
    sampler.set_version(0)
    rollout.end(0, 1)
    sampler.take(0)
    sampler.save(str(tmp_path / "sampler"))
    source = Source()
    make(cfg, source).load(str(tmp_path / "sampler"))
    assert source.state() == {"drawn": 4, "back": [2, 3]}


@pytest.mark.parametrize(
    ("file", "data"),
    [(GROUPS_FILE, b""), (GROUPS_FILE, b"\x92\xc4\x01\x90\xc4\x00"), (STATE_FILE, b'{"next": 1}')],
)
def test_what_is_something_else_is_refused(
    make: Any, tmp_path: Path, file: str, data: bytes
) -> None:
    sampler = make(SamplerConfig())
    sampler.save(str(tmp_path / "sampler"))
    (tmp_path / "sampler" / file).write_bytes(data)
    with pytest.raises(ConfigError, match="does not hold what a sampler has saved"):
        sampler.load(str(tmp_path / "sampler"))


def test_after_a_step_that_lacks_groups_nothing_is_submitted(
    make: Any, rollout: Rollout, tmp_path: Path
) -> None:
    """All prompts are back before a checkpoint, so that another start generates them again."""
    cfg, source = SamplerConfig(oversample=1.5, max_gen_batches=1), Source()
    sampler = make(cfg, keep=lambda group: Keep(group.prompt.uid < 2, "dull"))
    rollout.ends_on_abort = True
    sampler.set_version(0)
    rollout.end(0, 1)
    assert uids(sampler.take(0)) == [0, 1]
    assert sampler.shortage == ""
    sampler.set_version(1)
    rollout.started(2, 3, 4)
    rollout.end(2, 3)
    assert sampler.take(1) == []
    assert sampler.shortage == (
        "step 2 needs 2 groups, but of 2 only 0 were accepted (2 by dull rejected)"
    )
    assert sampler.metrics()["rollout/missing"] == 2
    sampler.save(str(tmp_path / "sampler"))
    make(cfg, source).load(str(tmp_path / "sampler"))
    assert source.state()["back"] == [*range(2, source.state()["drawn"])]


def test_a_step_that_takes_fewer_groups_says_how_many_it_lacks(make: Any, rollout: Rollout) -> None:
    cfg = SamplerConfig(max_gen_batches=1, when_short="train")
    sampler = make(cfg, keep=lambda group: Keep(group.prompt.uid != 3, "dull"))
    rollout.ends_on_abort = True
    sampler.set_version(0)
    rollout.end(0, 1)
    assert uids(sampler.take(0)) == [0, 1]
    assert "rollout/missing" not in sampler.metrics()
    rollout.version = 1
    sampler.set_version(1)
    rollout.end(2, 3)
    assert uids(sampler.take(1)) == [2]
    assert (sampler.metrics()["rollout/missing"], sampler.shortage) == (1, "")
    rollout.version = 2
    sampler.set_version(2)
    rollout.started(4, 5)
    rollout.end(4, 5)
    assert uids(sampler.take(2)) == [4, 5], "the run goes on"


def test_closing_ends_what_runs(make: Any, rollout: Rollout) -> None:
    sampler = make(SamplerConfig())
    sampler.set_version(0)
    rollout.ends_on_abort = True
    sampler.close()
    assert [call.is_aborted for call in rollout.calls.values()] == [True, True]
    assert not sampler._thread.is_alive()
