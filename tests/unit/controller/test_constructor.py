"""Settings that `spawn` passes on: which are refused, and how they cross."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from spmd_rl.config.run import RunConfig
from spmd_rl.controller.channel.codec import pack
from spmd_rl.controller.constructor import Constructor
from spmd_rl.controller.controller import Controller
from spmd_rl.controller.endpoint import Role
from spmd_rl.errors import ConfigError, ContractError
from spmd_rl.mesh.split import Placement
from spmd_rl.rollout.rollout import Rollout

ON_ONE = Placement("judge", (0,), {"dp": 1, "fsdp": 1, "tp": 1})


@dataclass(frozen=True)
class JudgeConfig:
    strict: bool = True


class Judge(Role):
    def __init__(self, cfg: JudgeConfig, context: Any, model: str, seed: int = 3) -> None:
        super().__init__(cfg, context)


class Untyped(Role):
    def __init__(self, cfg, context, model) -> None:  # type: ignore[no-untyped-def]
        super().__init__(cfg, context)


class Collects(Role):
    def __init__(self, cfg: JudgeConfig, context: Any, **settings: str) -> None:
        super().__init__(cfg, context)


@dataclass(frozen=True)
class Slow:
    kind: Literal["slow"] = "slow"
    wait_s: float = 1.0


@dataclass(frozen=True)
class Fast:
    kind: Literal["fast"] = "fast"
    sizes: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class Kinds:
    inner: Slow | Fast = field(default_factory=Slow)
    strict: bool = True


def test_a_config_crosses_whose_fields_have_kinds() -> None:
    codec = Constructor(Judge).codec(Kinds)
    for config in (Kinds(), Kinds(Fast(sizes=(3,)), strict=False)):
        assert codec.unpack(pack((config, "m", 3))) == (config, "m", 3)
    with pytest.raises(ContractError, match="Kinds: unknown key 'kind'"):
        codec.unpack(pack((Fast(), "m", 3)))
    with pytest.raises(ContractError, match="Kinds: inner.kind: expected one of 'slow'"):
        codec.unpack(pack(({"inner": {"kind": "other"}, "strict": True}, "m", 3)))


def test_values_come_in_order_with_defaults() -> None:
    judge = Constructor(Judge)
    assert judge.names == ("model", "seed")
    assert judge.arguments({"model": "m"}) == ("m", 3)
    assert judge.arguments({"seed": 5, "model": "m"}) == ("m", 5)
    assert judge.arguments({"model": "m"}, {"seed": 4, "pages": 9}) == ("m", 4)
    assert judge.arguments({"model": "m", "seed": 5}, {"seed": 4}) == ("m", 5)
    assert Constructor(Role).arguments({}) == Constructor(Collects).arguments({}) == ()


@pytest.mark.parametrize(
    ("role", "settings", "sentence"),
    [
        (Judge, {"model": "m", "sed": 1}, "Judge has no setting 'sed'.*those it has: model, seed"),
        (Role, {"model": "m"}, "Role has no setting 'model'.*those it has: none"),
        (Collects, {"model": "m"}, "Collects has no setting 'model'"),
        (Judge, {"seed": 1}, "Judge needs the setting 'model'"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused_before_anything_is_sent(
    role: type[Role], settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    """The controller's board has nothing to send with."""
    board: Any = SimpleNamespace(roster=SimpleNamespace(world_size=1))
    controller = Controller(RunConfig(folder=str(tmp_path)), board)
    with pytest.raises(ConfigError, match=sentence):
        controller.spawn(role, JudgeConfig(), on=ON_ONE, **settings)


def test_config_and_settings_cross_by_their_types() -> None:
    codec = Constructor(Judge).codec(JudgeConfig)
    assert codec.unpack(pack((JudgeConfig(False), "m", 4))) == (JudgeConfig(False), "m", 4)
    with pytest.raises(ContractError, match="Expected `str`, got `int`"):
        codec.unpack(pack((JudgeConfig(), 7, 4)))


def test_a_setting_needs_a_type() -> None:
    with pytest.raises(ConfigError, match="parameter 'model' needs a type, since it crosses"):
        Constructor(Untyped).codec(JudgeConfig)


def test_a_rollout_draws_with_no_seed_that_nobody_gave() -> None:
    with pytest.raises(ConfigError, match="Rollout needs the setting 'seed'"):
        Constructor(Rollout).arguments({"model": "models/small"})
