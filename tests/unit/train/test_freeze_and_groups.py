"""Frozen parameters and parameter groups of a trainer, against plain torch parameter groups."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
import torch

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.errors import ConfigError
from spmd_rl.train.config import OptimizerConfig, ParameterGroup, TrainerConfig
from spmd_rl.train.optimizer.parameter_groups import UpdateRule, moment_bytes, update_rules
from spmd_rl.train.trainer import Trainer
from tests.dist.train_case import local_weights, make_batch
from tests.unit.train.test_step import Oracle

SHAPES = {
    "model.embed_tokens.weight": (48, 64),
    "model.layers.0.self_attn.q_proj.weight": (96, 64),
    "model.layers.0.self_attn.q_proj.bias": (96,),
    "model.layers.0.mlp.down_proj.weight": (64, 128),
    "model.norm.weight": (64,),
    "lm_head.weight": (48, 64),
}
FREEZES = {
    "a prefix": ("model.embed_tokens.*", "model.layers.0.*", "model.layers.1.*"),
    "all but the head": ("model.*",),
    "within a unit": ("*mlp*",),
    "queries without a gradient": (
        "model.embed_tokens.*",
        "model.layers.0.input_layernorm.*",
        "model.layers.0.self_attn.q_*",
    ),
    "the head": ("lm_head.weight",),
    "in the middle": ("model.layers.1.*",),
}


def plain_groups(trainer: Trainer, oracle: Oracle) -> list[dict[str, object]]:
    """Each trained parameter as a group of its own, in torch's words."""
    cfg = trainer.cfg
    groups = []
    for name, one in oracle.model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in cfg.freeze):
            one.requires_grad_(False)
            continue
        rate, decay = cfg.lr, cfg.weight_decay if one.dim() > 1 else 0.0
        for group in cfg.groups:
            if fnmatchcase(name, group.pattern):
                rate = cfg.lr * group.lr_scale
                decay = decay if group.weight_decay is None else group.weight_decay
                break
        groups.append({"params": [one], "lr": rate, "weight_decay": decay})
    return groups


def errors(trainer: Trainer, oracle: Oracle) -> float:
    """The largest difference of a weight, over what the comparisons allow."""
    expected = dict(oracle.model.named_parameters())
    found = {name: one.local.detach() for name, one in local_weights(trainer).items()}
    assert found.keys() == expected.keys()
    return max(
        float(((one - expected[name].detach()).abs() / (2e-5 + 1e-4 * one.abs())).max())
        for name, one in found.items()
    )


def trained_beside_oracle(trainer: Trainer) -> float:
    """Train both for three steps, and return how far they are from each other."""
    oracle = Oracle(trainer)
    oracle.optimizer = torch.optim.AdamW(
        plain_groups(trainer, oracle), betas=trainer.cfg.betas, eps=trainer.cfg.eps, foreach=False
    )
    for seed in range(3):
        batch = make_batch(seed)
        stats = trainer.train_step(batch, grpo_loss)
        loss, norm = oracle.step(batch)
        assert stats["train/loss"] == pytest.approx(loss, rel=1e-5, abs=1e-7)
        assert stats["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    return errors(trainer, oracle)


@pytest.mark.parametrize("wrap", ["layer", "model"])
@pytest.mark.parametrize("freeze", FREEZES.values(), ids=FREEZES)
def test_frozen_parameters_against_plain_torch(
    new_trainer, freeze: tuple[str, ...], wrap: str
) -> None:
    trainer = new_trainer(
        freeze=freeze, wrap=wrap, max_tokens=120, weight_decay=0.1, clip_norm=0.05
    )
    before = {name: one.local.detach().clone() for name, one in local_weights(trainer).items()}
    assert trained_beside_oracle(trainer) <= 1
    for name, one in local_weights(trainer).items():
        is_frozen = any(fnmatchcase(name, pattern) for pattern in freeze)
        assert torch.equal(one.local, before[name]) == is_frozen, name


@pytest.mark.parametrize("recompute", ["cheap", "all"])
def test_frozen_layers_that_compute_again(new_trainer, recompute: str) -> None:
    options = {"freeze": ("model.embed_tokens.*", "model.layers.0.*"), "wrap": "layer"}
    trainer = new_trainer(recompute=recompute, **options)
    assert trained_beside_oracle(trainer) <= 1


def test_a_frozen_parameter_has_no_moments(new_trainer) -> None:
    trainer = new_trainer(freeze=("*.mlp.*",))
    state = trainer.backend.state()
    for kind, tensors in state.items():
        has_mlp = any(".mlp." in name for name, _ in tensors)
        assert has_mlp == (kind == "weights"), kind
    assert len(state["exp_avg"]) == len(state["weights"]) - 3 * 3


GROUPS = (
    ParameterGroup("lm_head.*", lr_scale=0.1),
    ParameterGroup("*layernorm*", lr_scale=3.0, weight_decay=0.2),
    ParameterGroup("model.layers.*", weight_decay=0.0),
    ParameterGroup("*q_proj*", lr_scale=100.0),  # without effect: the one before it holds
)


def test_groups_against_plain_torch(new_trainer) -> None:
    trainer = new_trainer(groups=GROUPS, weight_decay=0.3, clip_norm=0.05)
    assert trained_beside_oracle(trainer) <= 1


@pytest.mark.parametrize("missing", range(3))
def test_each_group_shows(new_trainer, missing: int) -> None:
    """The comparison fails if one group is left out."""
    groups = tuple(group for number, group in enumerate(GROUPS) if number != missing)
    trainer = new_trainer(groups=groups, weight_decay=0.3, clip_norm=0.05)
    oracle_of = new_trainer(groups=GROUPS, weight_decay=0.3, clip_norm=0.05)
    oracle = Oracle(trainer)
    oracle.optimizer = torch.optim.AdamW(
        plain_groups(oracle_of, oracle), betas=trainer.cfg.betas, eps=trainer.cfg.eps, foreach=False
    )
    for seed in range(3):
        trainer.train_step(make_batch(seed), grpo_loss)
        oracle.step(make_batch(seed))
    assert errors(trainer, oracle) > 10


def test_the_schedule_moves_all_groups(new_trainer) -> None:
    """A rate that is overridden for one step is overridden in proportion."""
    trainer = new_trainer(groups=(ParameterGroup("lm_head.*", lr_scale=0.0),), weight_decay=0.3)
    before = {name: one.local.detach().clone() for name, one in local_weights(trainer).items()}
    trainer.train_step(make_batch(0), grpo_loss, 0.5)
    for name, one in local_weights(trainer).items():
        assert torch.equal(one.local, before[name]) == (name == "lm_head.weight"), name


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"freeze": ("model.embed_token.*",)},
            "trainer.freeze: no parameter's name matches 'model.embed_token.*'; "
            "the nearest is 'model.embed_tokens.weight'",
        ),
        (
            {"groups": (ParameterGroup("lm_heads.weight"),)},
            "trainer.groups: no parameter's name matches 'lm_heads.weight'; "
            "the nearest is 'lm_head.weight'",
        ),
        ({"freeze": ("*",)}, "trainer.freeze matches every parameter: leave one to train"),
    ],
)
def test_patterns_that_cannot_be_meant(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        update_rules(SHAPES, TrainerConfig(**options), 1)
    assert str(raised.value) == sentence


def test_a_tied_head_is_named() -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    with pytest.raises(
        ConfigError, match="'lm_head.*'; the head of this model is tied to 'model.embed_tokens.w"
    ):
        update_rules(shapes, TrainerConfig(freeze=("lm_head.*",)), 1)


def test_muon_is_for_the_matrices_of_layers() -> None:
    cfg = TrainerConfig(optimizer=OptimizerConfig("muon"), weight_decay=0.5)
    rules = update_rules(SHAPES, cfg, 1)
    assert {name for name, rule in rules.items() if rule.algorithm == "muon"} == {
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    }
    assert rules["lm_head.weight"] == UpdateRule("adamw", 1.0, 0.5)
    assert rules["model.layers.0.self_attn.q_proj.bias"] == UpdateRule("adamw", 1.0, 0.0)


def test_eight_bits_are_for_shards_of_whole_blocks() -> None:
    cfg = TrainerConfig(optimizer=OptimizerConfig("adamw8bit"))
    shapes = {"a": (64, 128), "b": (63, 128), "c": (62, 128), "d": (8192,), "e": (32, 64)}
    chosen = {
        num_shards: {
            name
            for name, rule in update_rules(shapes, cfg, num_shards).items()
            if rule.algorithm == "adamw8bit"
        }
        for num_shards in (1, 2, 4)
    }
    assert chosen == {1: {"a", "c"}, 2: {"a"}, 4: set()}


def test_bytes_of_moments() -> None:
    """By hand: 3072 + 6144 + 96 + 8192 + 64 + 3072 = 20640 parameters."""
    sizes = {}
    for kind in ("adamw", "muon", "adamw8bit"):
        rules = update_rules(SHAPES, TrainerConfig(optimizer=OptimizerConfig(kind)), 1)
        sizes[kind] = moment_bytes(SHAPES, rules, 1)
    in_8bit = 6144 + 8192
    assert sizes == {
        "adamw": 8 * 20640,
        "muon": 8 * (20640 - in_8bit) + 4 * in_8bit,
        "adamw8bit": 8 * (20640 - in_8bit) + 2 * in_8bit + 8 * in_8bit // 256,
    }
    cfg = TrainerConfig(optimizer=OptimizerConfig("muon"), freeze=("*embed*",))
    rest = 20640 - in_8bit - 3072
    assert moment_bytes(SHAPES, update_rules(SHAPES, cfg, 2), 2) == 8 * rest // 2 + 4 * 8192, (
        "the larger of two matrices lies with the first of two ranks"
    )
