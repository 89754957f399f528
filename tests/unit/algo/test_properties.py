"""Properties of algorithms: what must change nothing, and what must teach nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spmd_rl.algo.algorithm import Algorithm
from spmd_rl.algo.gae import discounted_returns, gae
from spmd_rl.algo.losses import LossInput, ValueInput, grpo_loss
from spmd_rl.algo.make import ALGORITHMS
from spmd_rl.algo.overlong import overlong_penalty
from spmd_rl.algo.policy.policy_loss import policy_loss
from spmd_rl.algo.value_loss import value_loss
from spmd_rl.algo.whitening import whiten
from spmd_rl.errors import ConfigError, ContractError
from tests.unit.algo.by_hand import flat_logprobs
from tests.unit.algo.cases import batch_of, draw_case, groups_of, loss_and_gradient
from tests.unit.algo.test_algorithms_by_hand import algorithm

NAMES = st.sampled_from(sorted(ALGORITHMS))
COMPARING = sorted(set(ALGORITHMS) - {"ppo", "reinforce_pp"})


@settings(max_examples=40, deadline=None)
@given(NAMES, st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 4))
def test_any_split_gives_the_same_loss(name: str, seed: int, shards: int, micros: int) -> None:
    made, answers = algorithm(name), draw_case(seed)
    batch = batch_of(answers, made)
    logprobs = flat_logprobs(answers)
    whole, gradient = loss_and_gradient(made, batch, logprobs)
    split, split_gradient = loss_and_gradient(made, batch, logprobs, shards, micros)
    assert split == pytest.approx(whole, rel=1e-12, abs=1e-14)
    np.testing.assert_allclose(split_gradient, gradient, rtol=1e-12, atol=1e-15)


@settings(max_examples=40, deadline=None)
@given(NAMES, st.integers(0, 10_000), st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(name: str, seed: int, rng: object) -> None:
    made, answers = replace(algorithm(name), keeps=None), draw_case(seed)
    shuffled = list(range(len(answers)))
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    # groups stay together, in the order of their prompts
    shuffled.sort(key=lambda number: answers[number].prompt)
    others = [answers[number] for number in shuffled]
    loss, gradient = loss_and_gradient(made, batch_of(answers, made), flat_logprobs(answers))
    other, other_gradient = loss_and_gradient(made, batch_of(others, made), flat_logprobs(others))
    assert other == pytest.approx(loss, rel=1e-6, abs=1e-9)
    ends = np.cumsum([answer.num_tokens for answer in answers])
    rows = np.split(gradient, ends[:-1])
    expected = np.concatenate([rows[number] for number in shuffled])
    np.testing.assert_allclose(other_gradient, expected, rtol=1e-5, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(COMPARING), st.integers(0, 10_000), st.floats(-3, 3))
@example("turn_returns", 1, 1.4061948663138257)  # whose mean is another number
def test_a_group_with_equal_rewards_teaches_exactly_nothing(
    name: str, seed: int, reward: float
) -> None:
    made, answers = replace(algorithm(name), keeps=None), draw_case(seed)
    if name == "reinforce_pp_baseline":  # whitening moves the mean of a batch
        made = replace(made, credit=None)
    for answer in answers[: sum(answer.prompt == 0 for answer in answers)]:
        answer.reward = reward
        answer.parts = dict.fromkeys(answer.parts, reward)
    _, gradient = loss_and_gradient(made, batch_of(answers, made), flat_logprobs(answers))
    num_tokens = sum(answer.num_tokens for answer in answers if answer.prompt == 0)
    assert not gradient[:num_tokens].any()


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30))
def test_whitening(values: list[float]) -> None:
    array = np.array(values)
    white = whiten(array)
    if np.ptp(array) > 1e-3:
        assert white.mean() == pytest.approx(0, abs=1e-9)
        variance = array.var(ddof=1)
        assert white.var(ddof=1) == pytest.approx(variance / (variance + 1e-8), rel=1e-9)
    assert not whiten(np.full(len(values), values[0])).any()
    np.testing.assert_array_equal(np.sort(whiten(array[::-1])), np.sort(white))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.floats(0, 1), st.integers(0, 99))
def test_lambda_one_is_return_less_value(lengths: list[int], discount: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = np.array(lengths, np.int64)
    rewards, values = rng.standard_normal((2, int(sizes.sum())))
    returns = discounted_returns(rewards, sizes, discount=discount)
    advantages = gae(rewards, values, sizes, discount=discount, gae_lambda=1.0)
    np.testing.assert_allclose(advantages, returns - values, atol=1e-12)


@given(st.integers(0, 20), st.integers(1, 20), st.floats(0, 5))
def test_the_penalty_grows_to_its_whole(num_tokens: int, buffer: int, penalty: float) -> None:
    found = overlong_penalty(num_tokens, max_response_tokens=20, buffer=buffer, penalty=penalty)
    expected = -penalty * np.interp(num_tokens, [20 - buffer, 20], [0, 1])
    assert found == pytest.approx(expected, abs=1e-12)


def test_truncated_answers_weigh_nothing_and_the_others_what_they_did() -> None:
    answers = draw_case(3)
    plain, masked = algorithm("grpo"), algorithm("grpo", mask_truncated=True)
    first, second = (made.pack(groups_of(answers)) for made in (plain, masked))
    truncated = np.repeat([answer.status == "truncated" for answer in answers], first.lengths)
    assert truncated.any()
    assert first.denominator == second.denominator
    np.testing.assert_array_equal(second.weight, np.where(truncated, 0, first.weight))


def test_cut_answers_stay_in_the_baseline_and_failed_ones_do_not() -> None:
    """docs/algorithms.md, "What is left out", has these numbers."""
    made = algorithm("dr_grpo", mask_truncated=True)
    answers = [answer for answer in draw_case(3) if answer.prompt == 0][:4]
    assert len(answers) == 4
    for answer, reward in zip(answers, [1.0, 1.0, 0.0, 0.0], strict=True):
        answer.reward, answer.status = reward, "completed"
    answers[1].status = "truncated"
    (group,) = groups_of(answers)
    batch = made.pack([group])
    learned = batch.weight > 0
    assert set(batch.advantages[learned].tolist()) == {0.5, -0.5}
    np.testing.assert_array_equal(learned.sum(), batch.mask.sum() - answers[1].num_tokens)
    failed = replace(
        group,
        samples=[*group.samples[:1], *group.samples[2:]],
        failed=[group.samples[1].replace(status="failed")],
    )
    found = made.advantage([failed])[0]
    np.testing.assert_allclose(found, [2 / 3, -1 / 3, -1 / 3], rtol=1e-12)


def test_groups_without_a_choice_are_all_kept_if_none_is_left() -> None:
    answers = draw_case(3)
    for answer in answers:
        answer.reward = 1.0
    assert algorithm("dapo").pack(groups_of(answers)).num_sequences == len(answers)


def _float32_input(seed: int) -> LossInput:
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(4, 500, generator=generator)
    return LossInput(
        logprobs=(draws[0] * 0.3 - 1).requires_grad_(),
        old_logprobs=draws[1] * 0.3 - 1,
        rollout_logprobs=draws[2] * 0.3 - 1,
        advantages=draws[3],
        entropy=torch.zeros(500),
        sequence=torch.zeros(500, dtype=torch.int64),
    )


@pytest.mark.parametrize("behaviour", ["old", "rollout"])
def test_without_further_terms_the_loss_has_the_bits_of_grpo_loss(behaviour: str) -> None:
    made: Algorithm = algorithm("grpo", behaviour=behaviour)
    results = []
    for loss in (partial(grpo_loss, behaviour=behaviour), made.loss):  # type: ignore[arg-type]
        out = _float32_input(1)
        per_token, measured = loss(out)
        per_token.sum().backward()
        results.append((per_token, out.logprobs.grad, measured["train/clip_frac"]))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_nothing_flows_through_constants() -> None:
    """Weights, masks and the behaviour are constants, even where they carry a gradient."""
    out = _float32_input(2)
    sources = [out.old_logprobs.requires_grad_(), out.rollout_logprobs.requires_grad_()]
    loss, measured = policy_loss(
        out, correction="truncate", reject="sequence", opsm_delta=0.1, veto=0.01
    )
    loss.sum().backward()
    assert out.logprobs.grad is not None
    assert sources[1].grad is None or not sources[1].grad.any()
    assert not measured["train/correction_weight"].requires_grad


def test_an_empty_micro_batch_has_no_loss() -> None:
    none = torch.zeros(0)
    out = LossInput(none, none, none, none, none, none.long(), 1, {"reference_logprobs": none})
    loss, _ = policy_loss(
        out,
        surrogate="gspo",
        kl_coef=0.1,
        correction="mask",
        correction_level="geometric",
        reject="sequence",
        veto=0.1,
        opsm_delta=0.1,
    )
    assert loss.shape == (0,)


@pytest.mark.parametrize(
    ("keywords", "problem"),
    [
        ({"behaviour": "rollout", "correction": "mask"}, "corrects for the engine already"),
        ({"behaviour": "rollout", "veto": 0.1}, "corrects for the engine already"),
        ({"surrogate": "gppo"}, "expected ppo, gspo or cispo"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "expected gradient of 0"),
        ({"kl_coef": 0.1, "kl_estimator": "k2", "kl_unbiased": True}, "not for k2"),
        ({"kl_coef": 0.1, "kl_estimator": "k4"}, "expected k1, k2, k3 or low_var"),
        ({"correction": "drop"}, "expected truncate, clip or mask"),
        ({"correction": "mask", "correction_level": "word"}, "expected token, sequence"),
    ],
)
def test_the_function_refuses_what_is_wrong(keywords: dict[str, object], problem: str) -> None:
    out = replace(_float32_input(3), columns={"reference_logprobs": torch.zeros(500)})
    with pytest.raises(ValueError, match=problem):
        policy_loss(out, **keywords)  # type: ignore[arg-type]


def test_a_missing_column_is_named() -> None:
    with pytest.raises(ContractError, match="reads the column 'reference_logprobs'"):
        policy_loss(_float32_input(4), kl_coef=0.1)


def test_gdpo_names_a_missing_part() -> None:
    answers = draw_case(1)
    with pytest.raises(ConfigError, match="has no part 'style' of its reward"):
        algorithm("gdpo", reward_weights={"style": 1.0}).pack(groups_of(answers))


@given(st.lists(st.tuples(*(st.floats(-2, 2),) * 3), min_size=1, max_size=6), st.floats(0.05, 1))
def test_value_loss_by_hand(tokens: list[tuple[float, float, float]], clip: float) -> None:
    values, old, returns = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)
    )
    out = ValueInput(
        values, torch.zeros(len(values)).long(), 1, {"values": old, "returns": returns}
    )
    expected = [
        max((v - r) ** 2, (o + min(max(v - o, -clip), clip) - r) ** 2) / 2 for v, o, r in tokens
    ]
    np.testing.assert_allclose(value_loss(out, clip=clip)[0], expected, atol=1e-12)
    plain = [(v - r) ** 2 / 2 for v, _, r in tokens]
    np.testing.assert_allclose(value_loss(out, clip=0)[0], plain, atol=1e-12)
