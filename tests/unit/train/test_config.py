from __future__ import annotations

from pathlib import Path

import pytest

from spmd_rl.config.dump import dump_toml
from spmd_rl.config.load import load
from spmd_rl.controller.channel.codec import pack
from spmd_rl.controller.constructor import ConfigCodec
from spmd_rl.errors import ConfigError
from spmd_rl.train.config import OptimizerConfig, ParameterGroup, TrainerConfig, learning_rate


def test_warm_up_rises_to_the_rate_and_stays() -> None:
    cfg = TrainerConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(cfg, step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("schedule", "middle"), [("linear", 0.5), ("cosine", 0.5)])
def test_schedules_fall_to_zero_and_stay(schedule: str, middle: float) -> None:
    cfg = TrainerConfig(lr=1.0, schedule=schedule, warmup_steps=2, total_steps=10)
    assert learning_rate(cfg, 2) == 1.0
    assert learning_rate(cfg, 6) == pytest.approx(middle)
    assert learning_rate(cfg, 10) == learning_rate(cfg, 99) == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_tokens": 0}, "max_tokens = 0: expected at least 1"),
        ({"minibatches": 0}, "minibatches = 0"),
        ({"lr": float("nan")}, "lr = nan: expected 0 or more"),
        ({"seed": -1}, r"seed = -1: expected in \[0, 2\^63\)"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"schedule": "cosine"}, "total_steps = 0: expected more than warmup_steps = 0"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        TrainerConfig(**options)


@pytest.mark.parametrize(
    ("cls", "options", "sentence"),
    [
        (OptimizerConfig, {"momentum": 1.0}, r"momentum = 1.0: expected a number in \[0, 1\)"),
        (ParameterGroup, {"lr_scale": -1.0}, "lr_scale = -1.0: expected 0 or more, and finite"),
        (ParameterGroup, {"weight_decay": float("inf")}, "weight_decay = inf: expected 0 or more"),
    ],
)
def test_optimizer_settings_that_cannot_work(
    cls, options: dict[str, object], sentence: str
) -> None:
    needed = {"pattern": "*"} if cls is ParameterGroup else {}
    with pytest.raises(ConfigError, match=sentence):
        cls(**needed, **options)


def test_groups_from_the_command_line_and_back(tmp_path: Path) -> None:
    cfg = load(
        TrainerConfig,
        None,
        [
            "optimizer.kind=muon",
            'freeze=["model.embed_tokens.*"]',
            'groups=[{"pattern": "lm_head.*", "lr_scale": 2},'
            ' {"pattern": "*", "weight_decay": 0.1}]',
        ],
    )
    assert cfg == TrainerConfig(
        optimizer=OptimizerConfig("muon"),
        freeze=("model.embed_tokens.*",),
        groups=(ParameterGroup("lm_head.*", lr_scale=2.0), ParameterGroup("*", weight_decay=0.1)),
    )
    file = tmp_path / "cfg.toml"
    file.write_text(dump_toml(cfg))
    assert load(TrainerConfig, file) == cfg
    codec = ConfigCodec(TrainerConfig, ())
    assert codec.unpack(pack((cfg,))) == (cfg,)
    with pytest.raises(ConfigError, match=r"unknown key 'groups\[0\].lr'"):
        load(TrainerConfig, None, ['groups=[{"pattern": "*", "lr": 1.0}]'])
