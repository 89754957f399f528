"""Every algorithm against its formula by hand: loss and gradient, for given float64 log-probs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from spmd_rl.algo.advantages import group_advantage, rloo_advantage
from spmd_rl.algo.algorithm import Algorithm
from spmd_rl.algo.config import (
    CorrectionConfig,
    KlConfig,
    OverlongConfig,
    PolicyConfig,
)
from spmd_rl.algo.credit import reinforce_pp_credit
from spmd_rl.algo.make import make_algorithm
from spmd_rl.algo.policy.policy_loss import policy_loss
from spmd_rl.algo.turns import among_equal_states, by_turn, less_mean_return
from tests.unit.algo.by_hand import flat_logprobs, hand_gradient, hand_loss
from tests.unit.algo.cases import Answer, batch_of, draw_case, kept_answers, loss_and_gradient

MAX_TOKENS = 10


def algorithm(name: str, **settings: Any) -> Algorithm:
    cfg = PolicyConfig(algorithm=name, **settings)  # type: ignore[arg-type]
    return make_algorithm(cfg, num_samples=4, max_response_tokens=MAX_TOKENS)


# name of the case: (algorithm, its settings, the settings of the formula by hand)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grpo": ("grpo", {}, {}),
    "dr_grpo": ("dr_grpo", {}, {"advantage": "dr", "aggregation": "const"}),
    "dapo": ("dapo", {}, {"high": 0.28}),
    "dapo in full": (
        "dapo",
        {"overlong": OverlongConfig(buffer=5, penalty=0.5), "mask_truncated": True},
        {"high": 0.28, "overlong": (5, 0.5), "mask_truncated": True},
    ),
    "gspo": ("gspo", {}, {"surrogate": "gspo", "low": 3e-4, "high": 4e-4, "aggregation": "sample"}),
    "gspo, wide": (
        "gspo",
        {"clip_low": 0.09, "clip_high": 0.09},
        {"surrogate": "gspo", "low": 0.09, "high": 0.09, "aggregation": "sample"},
    ),
    "cispo": ("cispo", {}, {"surrogate": "cispo", "low": 1.0, "high": 4.0}),
    "cispo, narrow": (
        "cispo",
        {"clip_low": 0.1, "clip_high": 0.1},
        {"surrogate": "cispo", "low": 0.1, "high": 0.1},
    ),
    "rloo": ("rloo", {}, {"advantage": "rloo"}),
    "reinforce_pp": (
        "reinforce_pp",
        {"discount": 0.9, "kl": KlConfig(coef=0.1)},
        {"advantage": "reinforce_pp", "discount": 0.9, "kl_reward": 0.1},
    ),
    "reinforce_pp_baseline": (
        "reinforce_pp_baseline",
        {"kl": KlConfig(coef=0.1)},
        {"advantage": "baseline", "kl_reward": 0.1},
    ),
    "ppo": (
        "ppo",
        {"discount": 0.95, "gae_lambda": 0.9, "kl": KlConfig(coef=0.1)},
        {"advantage": "ppo", "discount": 0.95, "lambda": 0.9, "kl_reward": 0.1},
    ),
    "ppo, plain": ("ppo", {}, {"advantage": "ppo"}),
    "gdpo": ("gdpo", {}, {"advantage": "gdpo", "parts": {"right": 1.0, "ended": 1.0}}),
    "gdpo, weighted": (
        "gdpo",
        {"reward_weights": {"right": 0.7, "ended": 0.2}},
        {"advantage": "gdpo", "parts": {"right": 0.7, "ended": 0.2}},
    ),
    "gigpo": ("gigpo", {}, {}),  # no turn of these answers has a state
    "turn_returns": (
        "turn_returns",
        {"discount": 0.9},
        {"advantage": "turn_returns", "discount": 0.9},
    ),
    "kl as reward of a group": (
        "grpo",
        {"kl": KlConfig(coef=0.1, place="reward")},
        {"kl_reward": 0.1},
    ),
    **{
        f"kl {estimator}": (
            "grpo",
            {"kl": KlConfig(coef=0.3, estimator=estimator)},  # type: ignore[arg-type]
            {"kl": estimator, "kl_coef": 0.3},
        )
        for estimator in ("k2", "k3", "low_var")
    },
    **{
        f"kl {estimator}, unbiased": (
            "grpo",
            {"kl": KlConfig(coef=0.3, estimator=estimator, unbiased=True)},  # type: ignore[arg-type]
            {"kl": estimator, "kl_coef": 0.3, "kl_unbiased": True},
        )
        for estimator in ("k1", "k3")
    },
    "entropy": ("grpo", {"entropy_coef": 0.02}, {"entropy": 0.02}),
    "dual clip": ("grpo", {"dual_clip": 1.1}, {"dual": 1.1}),
    "opsm": ("grpo", {"opsm_delta": 0.02}, {"opsm": 0.02}),
    "behaviour": ("grpo", {"behaviour": "rollout"}, {"behaviour": "rollout"}),
    **{
        f"correction {mode} {level}": (
            "grpo",
            {"correction": CorrectionConfig(mode, level, high=1.5)},  # type: ignore[arg-type]
            {"weight": (mode, level, 1 / 1.5, 1.5)},
        )
        for mode in ("truncate", "clip", "mask")
        for level in ("token", "sequence", "geometric")
    },
    **{
        f"correction {mode} {level}, mean one": (
            "grpo",
            {
                "correction": CorrectionConfig(mode, level, high=1.5, mean_one=True),  # type: ignore[arg-type]
                "kl": KlConfig(coef=0.1),
            },
            {
                "weight": (mode, level, 1 / 1.5, 1.5),
                "mean_one": True,
                "kl": "low_var",
                "kl_coef": 0.1,
            },
        )
        for mode, level in (("truncate", "token"), ("clip", "geometric"), ("mask", "sequence"))
    },
    "icepop": (
        "grpo",
        {"correction": CorrectionConfig("mask", low=0.5, high=5.0)},
        {"weight": ("mask", "token", 0.5, 5.0)},
    ),
    **{
        f"reject {level}": (
            "grpo",
            {
                "correction": CorrectionConfig(reject=level, reject_high=1.3),  # type: ignore[arg-type]
                "kl": KlConfig(coef=0.1),
                "entropy_coef": 0.01,
            },
            {
                "reject": (level, 1 / 1.3, 1.3),
                "kl": "low_var",
                "kl_coef": 0.1,
                "entropy": 0.01,
            },
        )
        for level in ("token", "sequence", "geometric")
    },
    "veto": ("grpo", {"correction": CorrectionConfig(veto=0.6)}, {"veto": 0.6}),
}


def compare(
    made: Algorithm,
    answers: list[Answer],
    by_hand: dict[str, Any],
    num_shards: int = 1,
    num_micros: int = 1,
) -> None:
    """Assert that loss and gradient are those by hand, to 1e-6 of the largest gradient."""
    kept = kept_answers(answers, made)
    batch = batch_of(answers, made)
    logprobs = flat_logprobs(kept)
    loss, gradient = loss_and_gradient(made, batch, logprobs, num_shards, num_micros)
    settings = {"max_tokens": MAX_TOKENS} | by_hand
    expected = hand_loss(kept, [answer.logprobs for answer in kept], settings)
    expected_gradient = np.array(hand_gradient(kept, settings))
    size = np.abs(expected_gradient).max()
    assert size > 0
    assert abs(loss - expected) <= 1e-6 * max(size, abs(expected))
    np.testing.assert_allclose(gradient, expected_gradient, rtol=0, atol=1e-6 * max(size, 1e-3))


@pytest.mark.parametrize("observations", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient(case: str, observations: bool) -> None:
    name, settings, by_hand = CASES[case]
    for seed in range(2):
        answers = draw_case(seed, observations=observations, equal_group=True)
        compare(algorithm(name, **settings), answers, by_hand)


@pytest.mark.parametrize("case", CASES)
def test_shards_and_micro_batches_change_nothing(case: str) -> None:
    name, settings, by_hand = CASES[case]
    compare(algorithm(name, **settings), draw_case(7), by_hand, num_shards=2, num_micros=3)


def negated(made: Algorithm) -> Algorithm:
    def loss(out: Any) -> Any:
        per_token, measured = made.loss(out)
        return -per_token, measured

    return replace(made, loss=loss)


def with_loss(made: Algorithm, **keywords: Any) -> Algorithm:
    return replace(made, loss=partial(policy_loss, **(made.loss.keywords | keywords)))  # type: ignore[attr-defined]


def other_denominator(made: Algorithm) -> Algorithm:
    other = "sample" if made.aggregation == "token" else "token"
    return replace(made, aggregation=other)


RETURNS = partial(by_turn, advantage=less_mean_return, discount=1.0)
NO_STD = partial(group_advantage, use_std=False)
# a mistake that is easy to make, for each algorithm
MISTAKES: dict[str, Callable[[Algorithm], Algorithm]] = {
    "grpo": lambda made: replace(made, advantage=NO_STD),
    "dr_grpo": lambda made: replace(made, advantage=group_advantage),
    "dapo": lambda made: replace(made, keeps=None),
    "dapo in full": lambda made: replace(made, mask_truncated=False),
    "gspo, wide": lambda made: with_loss(made, surrogate="ppo"),
    "cispo, narrow": lambda made: with_loss(made, surrogate="ppo"),
    "rloo": lambda made: replace(made, advantage=NO_STD),
    "reinforce_pp": lambda made: replace(
        made, credit=partial(reinforce_pp_credit, kl_coef=0.1, discount=1.0)
    ),
    "reinforce_pp_baseline": lambda made: replace(made, advantage=rloo_advantage),
    "ppo": lambda made: replace(
        made,
        credit=partial(made.credit.func, **(made.credit.keywords | {"gae_lambda": 1.0})),  # type: ignore[union-attr]
    ),
    "gdpo": lambda made: replace(made, advantage=group_advantage),
    "gigpo": lambda made: replace(made, advantage=RETURNS),
    "turn_returns": lambda made: replace(
        made, advantage=partial(by_turn, advantage=among_equal_states, discount=0.9)
    ),
    "kl as reward of a group": lambda made: replace(made, credit=None),
    "kl k3": lambda made: with_loss(made, kl_estimator="k2"),
    "kl low_var": lambda made: with_loss(made, kl_coef=-0.3),
    "kl k1, unbiased": lambda made: with_loss(made, kl_estimator="k3"),
    "entropy": lambda made: with_loss(made, entropy_coef=-0.02),
    "dual clip": lambda made: with_loss(made, dual_clip=None),
    "opsm": lambda made: with_loss(made, opsm_delta=0.0),
    "behaviour": lambda made: with_loss(made, behaviour="old"),
    "correction truncate token": lambda made: with_loss(made, correction_level="geometric"),
    "correction mask sequence": lambda made: with_loss(made, correction="clip"),
    "correction truncate token, mean one": lambda made: replace(made, credit=None),
    "icepop": lambda made: with_loss(made, correction_low=0.0, correction_high=50.0),
    "reject sequence": lambda made: with_loss(made, reject="token"),
    "reject geometric": lambda made: with_loss(made, reject="none"),
    "veto": lambda made: with_loss(made, veto=0.0),
}


@pytest.mark.parametrize("case", [name for name in CASES if name in MISTAKES])
@pytest.mark.parametrize("mistake", ["wrong sign", "wrong denominator", "its own"])
def test_a_broken_variant_is_seen(case: str, mistake: str) -> None:
    name, settings, by_hand = CASES[case]
    broken = {
        "wrong sign": negated,
        "wrong denominator": other_denominator,
        "its own": MISTAKES[case],
    }[mistake]
    keeps_all = mistake == "its own" and case == "dapo"
    check = compare_without_choice if keeps_all else compare
    made = broken(algorithm(name, **settings))
    with pytest.raises(AssertionError):
        check_seeds(check, made, by_hand)


def check_seeds(check: Callable[..., None], made: Algorithm, by_hand: dict[str, Any]) -> None:
    for seed in range(2):
        check(made, draw_case(seed, equal_group=True), by_hand)


def compare_without_choice(made: Algorithm, answers: list[Answer], by_hand: dict[str, Any]) -> None:
    """Compare a DAPO that keeps every group with the formula over those that differ."""
    kept = kept_answers(answers, algorithm("dapo"))
    batch = batch_of(answers, made)
    loss, _ = loss_and_gradient(made, batch, flat_logprobs(answers))
    expected = hand_loss(kept, [answer.logprobs for answer in kept], by_hand)
    assert abs(loss - expected) <= 1e-6


def test_every_algorithm_has_a_case_and_a_mistake() -> None:
    from spmd_rl.algo.make import ALGORITHMS

    assert {CASES[name][0] for name in MISTAKES} == set(ALGORITHMS)
