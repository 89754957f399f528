"""Capabilities: a role has one in full, or not at all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spmd_rl.config.run import RunConfig
from spmd_rl.controller.capabilities import (
    CAPABILITIES,
    Contracted,
    InTurns,
    MemoryPlanner,
    Pumped,
    Saver,
    Sleeper,
    WeightProvider,
    WeightReceiver,
    capabilities,
)
from spmd_rl.controller.controller import Controller
from spmd_rl.controller.endpoint import Role, collective, local
from spmd_rl.controller.handle import Handle
from spmd_rl.controller.link import link_placement
from spmd_rl.errors import ConfigError
from spmd_rl.mesh.split import Placement
from spmd_rl.rollout.rollout import Rollout
from spmd_rl.train.trainer import Trainer

ONE_RANK = Placement("role", (0,), {"dp": 1, "fsdp": 1, "tp": 1})


class Plain(Role):
    @collective
    def count(self) -> int:
        return 0


class Napper(Role):
    """A Sleeper that inherits from nothing."""

    @collective
    def sleep(self) -> None: ...

    @collective
    def wake(self) -> None: ...


def test_trainer_and_rollout_have_the_capabilities_that_they_declare() -> None:
    assert capabilities(Trainer) == {WeightProvider, Saver, Sleeper, Contracted, MemoryPlanner}
    engine = {WeightReceiver, Sleeper, Contracted, MemoryPlanner, Pumped, InTurns}
    assert capabilities(Rollout) == engine
    for role in (Trainer, Rollout):
        assert capabilities(role) == set(CAPABILITIES) & set(role.__mro__)


def test_a_role_needs_none_and_need_not_inherit() -> None:
    assert capabilities(Plain) == frozenset()
    assert capabilities(Napper) == {Sleeper}


class MisspeltWake(Role):
    @collective
    def sleep(self) -> None: ...

    @collective
    def wake_up(self) -> None: ...


class MisspeltSleep(Role, Sleeper):
    @collective
    def slep(self) -> None: ...

    @collective
    def wake(self) -> None: ...


class MisspeltContract(Role, Contracted):
    def numerical_contract(self) -> dict[str, str | int]:
        return {}


class MisspeltPushed(Role):
    def weight_source(self) -> Any: ...

    def call_before_change(self, callback: Any) -> None: ...

    def on_weight_pushed(self, version: int) -> None: ...


class MisspeltSink(Role, WeightReceiver):
    def weights_sink(self) -> Any: ...


class NoLoad(Role):
    @collective
    def save(self, folder: str) -> None: ...

    @collective
    def wait_until_saved(self) -> None: ...

    @local
    def resume_differences(self) -> list[str]:
        return []


class Unmarked(Role):
    def sleep(self) -> None: ...

    def wake(self) -> None: ...


REFUSED = [
    (MisspeltWake, "MisspeltWake is no complete Sleeper: it lacks the method wake "),
    (MisspeltSleep, "MisspeltSleep is no complete Sleeper: it lacks the method sleep "),
    (MisspeltContract, "no complete Contracted: it lacks the method numeric_contract "),
    (
        MisspeltPushed,
        "MisspeltPushed is no complete WeightProvider: it lacks the method on_weights_pushed",
    ),
    (MisspeltSink, "MisspeltSink is no complete WeightReceiver: it lacks the method weight_sink"),
    (NoLoad, "NoLoad is no complete Saver: it lacks the method load "),
    (Unmarked, "Unmarked.sleep must be marked @collective or @local"),
]


# every call on it fails, for a refusal comes before the first command
NO_DISPATCHER: Any = SimpleNamespace(roster=SimpleNamespace(world_size=1))


def controller(folder: Path) -> Controller:
    return Controller(RunConfig(folder=str(folder)), NO_DISPATCHER)


def handle(name: str, role: type[Role]) -> Handle:
    return Handle(name, role, ONE_RANK, NO_DISPATCHER)


@pytest.mark.parametrize(("role", "sentence"), REFUSED)
def test_half_a_capability_is_refused_at_spawn(
    role: type[Role], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        controller(tmp_path).spawn(role, None, on=ONE_RANK)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_handle_records_what_its_role_can_do() -> None:
    assert handle("napper", Napper).capabilities == {Sleeper}


def test_a_link_needs_a_source_and_a_sink() -> None:
    trainer, rollout, plain = (
        handle(name, role)
        for name, role in {"trainer": Trainer, "rollout": Rollout, "plain": Plain}.items()
    )
    assert link_placement(trainer, rollout).name == "trainer->rollout"
    for source, destination, odd, capability in (
        (plain, rollout, "plain", "WeightProvider"),
        (trainer, plain, "plain", "WeightReceiver"),
        (rollout, trainer, "rollout", "WeightProvider"),
    ):
        with pytest.raises(ConfigError, match=f"the class of {odd} inherit from rl.{capability}$"):
            link_placement(source, destination)


def test_a_part_of_a_checkpoint_is_a_saver(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="'plain' cannot be part of a checkpoint: let its class inherit from rl.Saver",
    ):
        controller(tmp_path).resume(plain=cast(Plain, handle("plain", Plain)))
