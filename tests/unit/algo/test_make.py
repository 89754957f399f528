"""Settings of a policy update: what they choose, and what is refused."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest

from spmd_rl.algo import algorithms
from spmd_rl.algo.config import (
    AlgorithmName,
    CorrectionConfig,
    KlConfig,
    OverlongConfig,
    PolicyConfig,
)
from spmd_rl.algo.make import ALGORITHMS, make_algorithm
from spmd_rl.config.load import load
from spmd_rl.controller.channel.import_names import reference_to, resolve_reference
from spmd_rl.errors import ConfigError
from spmd_rl.recipes import grpo, grpo_async

RECIPES = (grpo.Config, grpo_async.Config)


def refused(**settings: Any) -> str:
    with pytest.raises(ConfigError) as found:
        make_algorithm(PolicyConfig(**settings), num_samples=4, max_response_tokens=10)
    return str(found.value)


def test_every_file_is_an_algorithm_that_can_be_chosen() -> None:
    files = {file.name for file in pkgutil.iter_modules(algorithms.__path__)}
    assert files == set(get_args(AlgorithmName)) == set(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_loss_crosses_to_the_workers(name: str) -> None:
    """By the name of its function, with the keywords of its settings."""
    correction = CorrectionConfig("mask", "geometric", reject="token", veto=0.1)
    cfg = PolicyConfig(
        algorithm=name,  # type: ignore[arg-type]
        kl=KlConfig(coef=0.1),
        correction=correction,
        entropy_coef=0.1,
    )
    loss = make_algorithm(cfg).loss
    there = resolve_reference(reference_to(loss))
    assert (there.func, there.keywords) == (loss.func, loss.keywords)  # type: ignore[attr-defined]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_recipe_takes_every_algorithm(recipe: type, name: str) -> None:
    cfg = load(recipe, None, ["model=m", "data=d", f"algorithm={name}", "kl.coef=0.1"])
    assert cfg.kl.coef == 0.1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ({}, set()),
        ({"kl": KlConfig(coef=0.1)}, {"reference_logprobs"}),
        ({"entropy_coef": 0.1}, {"entropy"}),
        ({"correction": CorrectionConfig("mask", mean_one=True)}, {"old_logprobs"}),
        ({"algorithm": "ppo"}, {"values"}),
        ({"algorithm": "ppo", "kl": KlConfig(coef=0.1)}, {"values", "reference_logprobs"}),
    ],
)
def test_what_an_algorithm_needs(settings: dict[str, Any], needs: set[str]) -> None:
    made = make_algorithm(PolicyConfig(**settings))
    assert made.needs == needs
    assert made.loss_needs.entropy == ("entropy" in needs)


def test_where_the_kl_divergence_enters() -> None:
    kl = KlConfig(coef=0.1)
    in_loss = make_algorithm(PolicyConfig(kl=kl))
    assert in_loss.loss.keywords["kl_estimator"] == "low_var"  # type: ignore[attr-defined]
    assert in_loss.credit is None
    for settings in ({"algorithm": "reinforce_pp", "kl": kl}, {"kl": KlConfig(0.1, "reward")}):
        made = make_algorithm(PolicyConfig(**settings))  # type: ignore[arg-type]
        assert "kl_coef" not in made.loss.keywords  # type: ignore[attr-defined]
        assert made.credit is not None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kl": KlConfig(0.1, estimator="k1")}, "kl.estimator = 'k1' teaches nothing as a loss"),
    (
        {"kl": KlConfig(0.1, estimator="k2", unbiased=True)},
        "kl.unbiased = true is right for k1 and k3",
    ),
    (
        {"kl": KlConfig(0.1, "reward", estimator="k3")},
        "kl.estimator = 'k3': expected auto or k1",
    ),
    (
        {"algorithm": "ppo", "kl": KlConfig(0.1, estimator="k3")},
        "a KL divergence as a reward is k1",
    ),
    ({"kl": KlConfig(0.1, "reward", unbiased=True)}, "kl.unbiased = True: expected false"),
    (
        {"behaviour": "rollout", "correction": CorrectionConfig("truncate")},
        "correction.mode = 'truncate' would correct twice",
    ),
    (
        {"behaviour": "rollout", "correction": CorrectionConfig(reject="token")},
        "correction.reject = 'token' would correct twice",
    ),
    (
        {"behaviour": "rollout", "correction": CorrectionConfig(veto=0.1)},
        "correction.veto = 0.1 would correct twice",
    ),
    ({"algorithm": "gspo", "clip_low": 0.2}, "clip_low = 0.2: expected less than 0.1"),
    ({"algorithm": "gspo", "clip_high": 0.2}, "clip_high = 0.2: expected less than 0.1"),
    ({"algorithm": "gspo", "dual_clip": 3.0}, "dual_clip is set, but algorithm = 'gspo' does not"),
    ({"gae_lambda": 0.9}, "gae_lambda is set, but algorithm = 'grpo' does not read it"),
    ({"value_clip": 0.1}, "leave it out, or set algorithm to ppo"),
    ({"critic_warmup_steps": 3}, "critic_warmup_steps is set"),
    ({"discount": 0.9}, "or set algorithm to reinforce_pp or ppo"),
    ({"reward_weights": {"right": 1.0}}, "or set algorithm to gdpo"),
    ({"algorithm": "gdpo", "overlong": OverlongConfig(4)}, "overlong.buffer is set, but"),
    ({"algorithm": "ppo", "drop_equal_groups": True}, "drop_equal_groups is set, but"),
    ({"kl": KlConfig(estimator="k3")}, "kl.estimator has no effect without kl.coef"),
    ({"correction": CorrectionConfig(high=3.0)}, "without correction.mode: set correction.mode"),
    ({"correction": CorrectionConfig(mean_one=True)}, "correction.mean_one has no effect without"),
    ({"correction": CorrectionConfig("mask", reject_low=0.1)}, "without correction.reject"),
    ({"overlong": OverlongConfig(penalty=2.0)}, "no effect without overlong.buffer"),
    ({"overlong": OverlongConfig(10)}, "overlong.buffer = 10: expected less than"),
]


@pytest.mark.parametrize(("settings", "sentence"), REFUSED)
def test_what_does_not_go_together(settings: dict[str, Any], sentence: str) -> None:
    assert sentence in refused(**settings)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["dual_clip=1"], "dual_clip = 1.0: expected more than 1"),
        (["dual_clip=nan"], "dual_clip = nan: expected more than 1"),
        (["entropy_coef=-1"], "entropy_coef = -1.0: expected 0 or more"),
        (["discount=1.5"], "discount = 1.5: expected between 0 and 1"),
        (["correction.high=0.5"], "correction: high = 0.5: expected 1 or more"),
        (["correction.low=2"], "correction: low = 2.0: expected between 0 and 1"),
        (["kl.coef=-1"], "kl: coef = -1.0: expected 0 or more"),
        (["sampling.num_samples=1"], "sampling.num_samples = 1: expected 2 or more"),
        (["sampling.temperature=0"], "temperature"),
        (["algorithm=reppo"], "algorithm: expected one of 'grpo', 'dr_grpo'"),
        (["critic.lr=1e-3"], "critic.lr is set, but algorithm = 'grpo' does not read it"),
        (["tis_cap=2"], "unknown key 'tis_cap'"),
    ],
)
def test_what_the_recipe_refuses(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as found:
        load(grpo.Config, None, ["model=m", "data=d", *words])
    assert sentence in str(found.value)


@pytest.mark.parametrize("name", ["ppo", "reinforce_pp"])
def test_one_sample_is_enough_where_none_are_compared(name: str) -> None:
    words = ["model=m", "data=d", f"algorithm={name}", "sampling.num_samples=1"]
    assert load(grpo.Config, None, words).sampling.num_samples == 1


def test_one_step_ahead_may_correct_what_it_takes_the_ratio_against() -> None:
    words = ["model=m", "data=d", "correction.mode=truncate"]
    with pytest.raises(ConfigError, match="or set behaviour = 'old'"):
        load(grpo_async.Config, None, words)
    assert load(grpo_async.Config, None, [*words, "behaviour=old"]).behaviour == "old"


def test_a_default_of_a_recipe_is_not_a_setting() -> None:
    """A recipe may have other defaults than the parts that it inherits."""

    @dataclass(frozen=True, kw_only=True)
    class Config(PolicyConfig):
        gae_lambda: float = 0.9
        kl: KlConfig = field(default_factory=lambda: KlConfig(refresh_every=3))

    make_algorithm(Config())
    with pytest.raises(ConfigError, match="gae_lambda is set"):
        make_algorithm(Config(gae_lambda=1.0))
    with pytest.raises(ConfigError, match="kl.refresh_every has no effect without kl.coef"):
        make_algorithm(Config(kl=KlConfig(refresh_every=2)))


def test_what_the_engine_is_told_of_the_correction() -> None:
    words = [
        PolicyConfig(correction=CorrectionConfig("mask", "geometric", high=3.0)),
        PolicyConfig(correction=CorrectionConfig(reject="sequence", veto=0.01)),
        PolicyConfig(behaviour="rollout"),
        PolicyConfig(),
    ]
    assert [cfg.correction_in_words for cfg in words] == [
        "mask at 3 by geometric",
        "rejection above 2 by sequence, veto below 0.01",
        "the ratio is taken against the engine's log-probs",
        "none (correction.mode = none)",
    ]
