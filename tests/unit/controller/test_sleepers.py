"""Which roles are put to sleep and woken as phases change, and in which order."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import pytest

from spmd_rl.controller.capabilities import Sleeper
from spmd_rl.controller.handle import Handle
from spmd_rl.controller.sleepers import Sleepers, SleepPolicy
from spmd_rl.errors import ResidencyError
from spmd_rl.mesh.split import Placement
from spmd_rl.offload.phases import ALL, COLOCATED, CONCURRENT, Phases

TRAINER, ENGINE, WHOLE = ("master", "moments"), ("weights", "kv"), ALL


class FakeHandle:
    """A role that notes the calls of `sleep` and `wake`."""

    def __init__(
        self, name: str, tags: tuple[str, ...], calls: list[str], ranks: tuple[int, ...] = (0,)
    ) -> None:
        self.name, self.memory_tags, self._calls = name, tags, calls
        self.placement = Placement(name, ranks, {"dp": len(ranks), "fsdp": 1, "tp": 1})
        self.capabilities = {Sleeper}
        self.endpoints = {"sleep": FakeEndpoint(self, "sleep"), "wake": FakeEndpoint(self, "wake")}
        self.fails = ""

    def note(self, what: str, *tags: tuple[str, ...]) -> None:
        if self.fails == what:
            raise ResidencyError("no room")
        self._calls.append(" ".join([what, self.name, *(tag for part in tags for tag in part)]))


class FakeEndpoint:
    def __init__(self, handle: FakeHandle, what: str) -> None:
        self._handle, self._what = handle, what

    def start(self, *tags: tuple[str, ...]) -> Any:
        return FakeCall(self._handle, self._what, tags)


class FakeCall:
    def __init__(self, handle: FakeHandle, what: str, tags: tuple[tuple[str, ...], ...]) -> None:
        self._handle, self._what, self._tags = handle, what, tags

    def wait(self) -> None:
        self._handle.note(self._what, *self._tags)


class Case:
    """Roles by name, and the calls that they got since they were last looked at."""

    def __init__(self, policy: SleepPolicy, **roles: Any) -> None:
        self.calls: list[str] = []
        self.timed: list[str] = []
        self.sleepers = Sleepers(policy, self._timed, lambda *_: None)
        self.handles = {}
        for name, (tags, *ranks) in roles.items():
            self.handles[name] = FakeHandle(name, tags, self.calls, *ranks)
            self.sleepers.add(self.handle(name))

    def _timed(self, name: str) -> Any:
        self.timed.append(name)
        return nullcontext()

    def handle(self, name: str) -> Handle:
        return cast(Handle, self.handles[name])

    def enter(self, phase: str) -> list[str]:
        self.sleepers.enter(phase)
        return self.seen()

    def wake_only(self, *names: str) -> list[str]:
        self.sleepers.wake_only([self.handle(name) for name in names])
        return self.seen()

    def seen(self) -> list[str]:
        calls = list(self.calls)
        self.calls.clear()
        return calls


def colocated(**roles: Any) -> Case:
    both = {"train": (TRAINER,), "infer": (ENGINE,)}
    return Case(SleepPolicy(phases=COLOCATED), **(both | roles))


def test_weights_wake_for_the_push_and_pages_when_the_trainer_sleeps() -> None:
    case = colocated()
    assert case.enter("train") == ["sleep infer weights kv"]
    assert case.enter("sync") == ["sleep train moments", "wake infer weights"]
    assert case.enter("rollout") == ["sleep train master", "wake infer kv"]
    assert case.enter("eval") == [], "the same memory is awake"
    assert case.enter("train") == ["sleep infer weights kv", "wake train master moments"]
    assert case.timed == ["sleep", "sleep", "wake", "sleep", "wake", "sleep", "wake"]


def test_all_go_to_sleep_before_one_wakes() -> None:
    case = colocated(reference=(("weights",),), critic=(TRAINER,))
    case.enter("rollout")
    assert case.enter("train") == [
        "sleep infer weights kv",
        "wake train master moments",
        "wake reference weights",
        "wake critic master moments",
    ]


def test_a_role_without_company_stays_awake() -> None:
    case = colocated(infer=(ENGINE, (1,)), reference=(("weights",), (0,)))
    assert case.enter("rollout") == [], "the trainer's ranks have no engine"
    assert case.enter("train") == []
    apart = colocated(infer=(ENGINE, (1,)), reference=(("weights",), (1,)))
    assert apart.enter("rollout") == ["sleep reference weights"], "it is with the engine here"
    assert apart.enter("train") == ["sleep infer weights kv", "wake reference weights"]


def test_undeclared_phases_and_roles_change_nothing() -> None:
    case = colocated(judge=(("weights",),))
    assert case.enter("train") == ["sleep infer weights kv"], "the judge is in no phase"
    assert case.enter("holiday") == []
    case = Case(SleepPolicy(phases=CONCURRENT), train=(TRAINER,), infer=(ENGINE,))
    assert case.enter("train") == case.enter("rollout") == []


def test_nothing_sleeps_where_the_policy_says_so() -> None:
    case = Case(SleepPolicy(sleeps=False), train=(TRAINER,), infer=(ENGINE,))
    assert case.enter("train") == case.wake_only("train") == []
    assert case.sleepers.role_sleep("train") is None


def test_roles_that_are_named_in_place_are_awake_as_wholes() -> None:
    case = Case(SleepPolicy(), train=(TRAINER,), infer=(ENGINE,), old=(WHOLE,), far=(WHOLE, (1,)))
    assert case.wake_only("train") == ["sleep infer weights kv", "sleep old"]
    assert case.wake_only("train", "old") == ["wake old"]
    assert case.wake_only("infer") == [
        "sleep train master moments",
        "sleep old",
        "wake infer weights kv",
    ]


def test_a_role_without_tags_sleeps_as_a_whole_in_declared_phases_too() -> None:
    phases = COLOCATED.with_roles(sync={"old": ("any",)})
    case = Case(SleepPolicy(phases=phases), train=(TRAINER,), infer=(ENGINE,), old=(WHOLE,))
    assert "sleep old" in case.enter("rollout")
    assert case.enter("sync")[-1] == "wake old"


def test_room_is_made_before_a_role_is_built() -> None:
    case = colocated(judge=(("weights",),))
    case.sleepers.make_room(Placement("critic", (0,), {"dp": 1, "fsdp": 1, "tp": 1}))
    assert case.seen() == ["sleep train master moments", "sleep infer weights kv"]
    case.sleepers.make_room(Placement("far", (1,), {"dp": 1, "fsdp": 1, "tp": 1}))
    assert case.seen() == []


def test_what_every_phase_keeps_awake_makes_no_room() -> None:
    phases = Phases(
        {
            "rollout": {"train": ("master",), "infer": ALL},
            "train": {"train": ALL, "infer": ("weights",)},
        }
    )
    case = Case(SleepPolicy(phases=phases), train=(TRAINER,), infer=(ENGINE,))
    case.sleepers.make_room(Placement("critic", (0,), {"dp": 1, "fsdp": 1, "tp": 1}))
    assert case.seen() == ["sleep train moments", "sleep infer kv"]
    sleep = case.sleepers.role_sleep("train")
    assert sleep is not None
    assert (sleep.may_sleep("master"), sleep.may_sleep("moments")) == (False, True)


def test_what_a_checkpoint_is_made_of_wakes() -> None:
    case = colocated(reference=(("weights",),))
    parts = [case.handle("train"), case.handle("reference")]
    case.enter("train")
    case.seen()
    case.sleepers.wake_for_checkpoint(parts)
    assert case.seen() == [], "both are awake"
    case.enter("rollout")
    case.seen()
    case.sleepers.wake_for_checkpoint(parts)
    assert case.seen() == [
        "sleep infer weights kv",
        "wake train master moments",
        "wake reference weights",
    ]


def test_a_role_that_could_not_wake_still_counts_as_asleep() -> None:
    case = colocated()
    case.enter("rollout")
    case.handles["train"].fails = "wake"
    with pytest.raises(ResidencyError, match="no room"):
        case.enter("train")
    case.handles["train"].fails = ""
    case.seen()
    assert case.enter("train") == ["wake train master moments"]


def test_a_role_is_told_its_own_phases() -> None:
    sleep = colocated().sleepers.role_sleep("infer")
    assert sleep is not None
    assert sleep.phases == {"sync": ("weights",), "eval": ALL, "rollout": ALL, "train": ()}
    assert sleep.may_sleep("weights")
    assert sleep.may_sleep("kv")
    assert colocated().sleepers.role_sleep("judge") is None
