"""Settings of samplers in recipes: who has one, who refuses it, and what the plan makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from spmd_rl.config.load import load
from spmd_rl.errors import ConfigError, PlanError
from spmd_rl.plan.resolve import resolve
from spmd_rl.recipes import grpo, grpo_async, grpo_fully_async, rlhf
from tests.unit.algo.cases import draw_case, groups_of
from tests.unit.recipes.test_policy_update import Ctl, update

ROUNDS = ["sampler.round_tokens=8", "sampler.max_lag=1", "sampler.oversample=1.5"]
EXAMPLE = "examples/arithmetic/model"


def config(recipe: Any, *words: str) -> Any:
    return load(recipe.Config, overrides=["model=m", "data=d", *words])


@pytest.mark.parametrize(
    ("recipe", "words", "sentence"),
    [
        (grpo, ["sampler.max_lag=1"], "sampler.max_lag = 1: expected 0, because this recipe is on"),
        (grpo_async, ["sampler.oversample=2"], "sampler is set, but this recipe generates without"),
        (rlhf, ["sampler.max_running=8"], "sampler is set, but this recipe generates without"),
        (grpo_fully_async, ["sampler.max_lag=-1"], "max_lag = -1: expected 0 or more"),
        (grpo_fully_async, ROUNDS, "sampler.round_tokens = 8: expected 0, because this recipe gen"),
        (grpo, ROUNDS, 'sampler.round_tokens with behaviour = "old": tokens of earlier steps'),
        (grpo, ["mask_lag=-1"], "mask_lag = -1: expected 0 or more, or none"),
    ],
)
def test_settings_that_a_recipe_does_not_read(recipe: Any, words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config(recipe, *words)


@pytest.mark.parametrize(
    ("words", "has_one"),
    [
        ((), False),
        (("algorithm=dapo",), True),
        (("algorithm=dapo", "drop_equal_groups=false"), False),
        (("drop_equal_groups=true",), True),
        (("sampler.oversample=1.5",), True),
        (("sampler.max_running=4",), True),
    ],
)
def test_when_grpo_has_a_sampler(words: tuple[str, ...], has_one: bool) -> None:
    assert grpo.replaces_groups(config(grpo, *words), update(Ctl(), *words)) == has_one


@pytest.mark.parametrize("word", ["behaviour=rollout", "correction.mode=truncate"])
def test_rounds_correct_for_older_weights(word: str) -> None:
    assert config(grpo, *ROUNDS, word).sampler.round_tokens == 8


def test_groups_with_equal_rewards_are_rejected_by_name() -> None:
    groups = groups_of(draw_case(0, equal_group=True))
    verdicts = [update(Ctl(), "algorithm=dapo").keep(group) for group in groups]
    assert [verdict.ok for verdict in verdicts] == [False, True, True, True]
    assert verdicts[0].reason == "equal_rewards"
    assert all(update(Ctl()).keep(group).ok for group in groups)


def test_the_plan_of_engines_that_never_sleep() -> None:
    words = f"model={EXAMPLE}", "trainer.dtype=float32", "engine.dtype=float32"
    plan = resolve(config(grpo_fully_async, *words), 2)
    assert (plan.placements.train.ranks, plan.placements.infer.ranks) == ((0,), (1,))
    assert not grpo_fully_async.Config.phases.roles
    assert plan.ledgers[1].beside_bytes("kv") > 0
    with pytest.raises(PlanError, match=r"split\.infer shares ranks with split\.train"):
        resolve(config(grpo_fully_async, *words, "split.infer.ranks=all"), 2)
