"""RunNeeds: what is read of any recipe's config."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from spmd_rl.config.load import load
from spmd_rl.offload.phases import CONCURRENT
from spmd_rl.plan.needs import RunNeeds
from spmd_rl.recipes import collect, evaluate, grpo, reward_model, sft
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.trainer import Trainer
from spmd_rl.train.value_trainer import ValueTrainer


def test_what_a_config_has_is_found() -> None:
    cfg = load(grpo.Config, overrides=["model=m", "data=d", "algorithm=ppo", "steps=7"])
    needs = RunNeeds.of(cfg)
    assert (needs.trainer, needs.critic, needs.engine) == (cfg.trainer, cfg.critic, cfg.engine)
    assert (needs.model, needs.steps, needs.phases) == ("m", 7, grpo.Config.phases)
    assert [role.name for role in needs.extra_roles()] == ["critic"]


def test_what_a_config_has_not_is_none_or_the_default() -> None:
    supervised = RunNeeds.of(load(sft.Config, overrides=["model=m", "data=d"]))
    assert (supervised.engine, supervised.sampling, supervised.eval) == (None, None, None)
    assert (supervised.trainer_role, supervised.phases) == (Trainer, CONCURRENT)
    assert not supervised.extra_roles()
    collected = RunNeeds.of(load(collect.Config, overrides=["model=m", "data=d"]))
    assert (collected.trainer, collected.eval, collected.epochs) == (None, None, 0)
    valued = load(reward_model.Config, overrides=["model=m", "data=d"])
    assert RunNeeds.of(valued).trainer_role is ValueTrainer
    assert RunNeeds.of(object()) == RunNeeds()


def test_an_evaluation_pushes_a_checkpoint_alone() -> None:
    words = ["model=m", "data=d"]
    assert not RunNeeds.of(load(evaluate.Config, overrides=words)).pushes
    assert RunNeeds.of(load(evaluate.Config, overrides=[*words, "checkpoint=c"])).pushes
    assert RunNeeds.of(load(grpo.Config, overrides=words)).pushes


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("model", 3, "m"),
        ("model", None, "m"),
        ("trainer", "fast", TrainerConfig()),
        ("engine", "fast", NativeEngineConfig()),
    ],
)
def test_another_type_counts_as_none(name: str, wrong: object, right: object) -> None:
    default = getattr(RunNeeds(), name)
    assert getattr(RunNeeds.of(SimpleNamespace(**{name: wrong})), name) == default
    assert getattr(RunNeeds.of(SimpleNamespace(**{name: right})), name) == right
