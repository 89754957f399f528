"""Tokens outside the mask are in no sum: neither in the loss and its gradient, nor in a mean."""

from __future__ import annotations

from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spmd_rl.algo.group_metrics import group_metrics
from spmd_rl.algo.make import ALGORITHMS
from spmd_rl.algo.packing import Aggregation, pack
from spmd_rl.types.batch import Batch
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample
from tests.unit.algo.by_hand import flat_logprobs
from tests.unit.algo.cases import batch_of, draw_case, loss_and_gradient
from tests.unit.algo.test_algorithms_by_hand import algorithm

MAX_TOKENS = 8
# of a token: drawn by an engine; drawn, but left out by the sample; said by a tool
KINDS = st.sampled_from(["drawn", "left out", "said"])


@st.composite
def _sample(draw: st.DrawFn, uid: int, index: int) -> Sample:
    kinds = draw(st.lists(KINDS, max_size=6))
    said = np.array([kind == "said" for kind in kinds], np.bool_)
    numbers = np.array([draw(st.integers(1, 50)) for _ in kinds], np.int32)
    sample = Sample(
        uid,
        index,
        numbers,
        np.where(said, 0, -numbers / 64).astype(np.float32),
        np.where(said, -1, numbers % 4).astype(np.int32),
        draw(st.sampled_from(["completed", "truncated"])),
        reward=float(draw(st.integers(0, 3))),
        execution=draw(st.integers(-1, 1)),
    )
    if "left out" not in kinds:
        return sample
    return sample.replace(mask=np.array([kind == "drawn" for kind in kinds]))


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    return [
        Group(
            Prompt(uid, np.arange(draw(st.integers(1, 3)), dtype=np.int32)),
            [draw(_sample(uid, index)) for index in range(draw(st.integers(2, 4)))],
        )
        for uid in range(draw(st.integers(1, 3)))
    ]


def _oracle(
    made: list[Group], advantages: list[list[float]], aggregation: Aggregation
) -> tuple[float, list[float]]:
    """Return the mean of advantage * token id over all learned tokens, exactly, and the share of
    each such token in it.
    """
    runs: dict[tuple[int, int], list[tuple[float, list[int]]]] = {}
    for group, values in zip(made, advantages, strict=True):
        for sample, value in zip(group.samples, values, strict=True):
            own = (-1 - sample.index) if sample.execution < 0 else sample.execution
            tokens = [
                t for t, is_in in zip(sample.tokens.tolist(), sample.mask, strict=True) if is_in
            ]
            runs.setdefault((group.prompt.uid, own), []).append((value, tokens))
    samples = [sample for run in runs.values() for sample in run]
    total = sum(len(tokens) for _, tokens in samples)
    share_of = {
        "token": lambda run, tokens: Fraction(1, max(total, 1)),
        "sample": lambda run, tokens: Fraction(1, len(samples) * len(tokens)),
        "execution": lambda run, tokens: Fraction(1, len(runs) * sum(len(t) for _, t in run)),
        "const": lambda run, tokens: Fraction(1, len(samples) * MAX_TOKENS),
    }[aggregation]
    mean, shares = Fraction(0), []
    for run in runs.values():
        for value, tokens in run:
            for token in tokens:
                share = share_of(run, tokens)
                mean += share * Fraction(value) * token
                shares.append(float(share))
    return float(mean), sorted(shares)


@given(groups(), st.sampled_from(["token", "sample", "execution", "const"]), st.data())
def test_a_batch_weighs_the_tokens_of_the_mask_alone(
    made: list[Group], aggregation: Aggregation, data: st.DataObject
) -> None:
    advantages = [[float(data.draw(st.integers(-4, 4))) for _ in group.samples] for group in made]
    batch = pack(
        made,
        [np.array(values) for values in advantages],
        aggregation=aggregation,
        max_response_tokens=MAX_TOKENS,
    )
    masks = [
        np.concatenate([np.zeros(len(group.prompt.tokens), np.bool_), sample.mask])
        for group in made
        for sample in group.samples
    ]
    np.testing.assert_array_equal(batch.mask, np.concatenate(masks))
    assert not batch.weight[~batch.mask].any()
    assert not batch.advantages[~batch.mask].any()
    shares = batch.weight[batch.mask].astype(np.float64) / batch.denominator
    expected, expected_shares = _oracle(made, advantages, aggregation)
    np.testing.assert_allclose(np.sort(shares), expected_shares, rtol=1e-7)
    terms = batch.weight.astype(np.float64) * batch.advantages * batch.tokens
    rounding = 1e-6 * np.abs(terms).sum() / batch.denominator  # terms may cancel each other
    assert terms.sum() / batch.denominator == pytest.approx(expected, rel=0, abs=rounding + 1e-9)


@given(groups())
def test_columns_and_objects_pack_alike(made: list[Group]) -> None:
    zeros = [np.zeros(group.num_samples) for group in made]
    here, came = pack(made, zeros), pack(Group.to_columns(made).rows(), zeros)
    for field in fields(Batch):
        assert str(getattr(here, field.name)) == str(getattr(came, field.name))


@given(groups())
def test_statistics_are_over_tokens_of_engines(made: list[Group]) -> None:
    samples = [sample for group in made for sample in group.samples]
    versions = [int(v) for sample in samples for v in sample.versions if v >= 0]
    found = group_metrics(made, version=5)
    assert found["rollout/response_tokens_mean"] == pytest.approx(len(versions) / len(samples))
    lags = [5 - version for version in versions] or [0]
    assert found["version/lag_mean"] == pytest.approx(sum(lags) / len(lags))
    assert found["version/lag_max"] == max(lags)


def _change_observations(answers: list[Any], rng: np.random.Generator) -> None:
    """Change every number of the tokens that are not learned."""
    for answer in answers:
        for token, learned in enumerate(answer.learned):
            if not learned:
                for name in ("logprobs", "old", "rollout", "reference", "values", "entropy"):
                    getattr(answer, name)[token] = float(rng.normal())


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(ALGORITHMS)), st.integers(0, 10_000))
def test_what_a_tool_said_moves_no_loss_and_gets_no_gradient(name: str, seed: int) -> None:
    made, answers = replace(algorithm(name), keeps=None), draw_case(seed, observations=True)
    learned = np.array([learned for answer in answers for learned in answer.learned])
    assume(not learned.all())
    batch = batch_of(answers, made)
    loss, gradient = loss_and_gradient(made, batch, flat_logprobs(answers))
    assert not gradient[~learned].any()
    _change_observations(answers, np.random.default_rng(seed))
    again, other = loss_and_gradient(made, batch_of(answers, made), flat_logprobs(answers))
    assert again == loss
    np.testing.assert_array_equal(other, gradient)


def test_control_a_mask_of_all_tokens_is_seen() -> None:
    """The same numbers, learned from in full, give another loss."""
    made, answers = algorithm("grpo"), draw_case(3, observations=True)
    loss, _ = loss_and_gradient(made, batch_of(answers, made), flat_logprobs(answers))
    for answer in answers:
        answer.learned = [True] * answer.num_tokens
    other, gradient = loss_and_gradient(made, batch_of(answers, made), flat_logprobs(answers))
    assert other != loss
    assert gradient.any()
