"""Scores of held-out data, against sums by hand and against resampling."""

from __future__ import annotations

import math

import numpy as np
import pytest

from spmd_rl.algo.packing import pack_sft
from spmd_rl.evaluation.held_out_scores import (
    pair_measures,
    pair_scores,
    token_measures,
    token_scores,
)
from spmd_rl.types.batch import Batch
from spmd_rl.types.token_values import TokenValues


def batch_of(*masks: str) -> Batch:
    """Sequences of the tokens 0, 1, 2 and so on, of which those at an x are learned."""
    learned = [np.array([letter == "x" for letter in mask]) for mask in masks]
    return pack_sft([(np.arange(len(mask), dtype=np.int32), mask) for mask in learned])


def values(batch: Batch, of_tokens: list[float], dtype: type = np.float32) -> TokenValues:
    return TokenValues(np.array(of_tokens, dtype), batch.lengths, batch.index)


def test_tokens_weigh_alike_and_those_outside_the_mask_do_not_count() -> None:
    batch = batch_of("..x", ".xxx")
    logprobs = values(batch, [9, 9, -1.0, 9, -0.5, -0.25, -2.0])
    likeliest = TokenValues(
        np.array([[0], [1], [2], [0], [1], [7], [7]], np.int32), batch.lengths, batch.index
    )
    found = token_scores(token_measures(batch, logprobs, likeliest))
    assert found["loss"] == pytest.approx(3.75 / 4)
    assert found["token_accuracy"] == pytest.approx(2 / 4)
    assert found["perplexity"] == pytest.approx(math.exp(3.75 / 4))


def test_a_set_without_a_learned_token_has_no_score() -> None:
    batch = batch_of("...", "x")
    zeros = values(batch, [0.0] * 4)
    assert token_scores(token_measures(batch, zeros, zeros)) == {}


def test_a_loss_of_any_size_has_a_finite_perplexity() -> None:
    batch = batch_of(".x")
    found = token_scores(
        token_measures(batch, values(batch, [0, -1e30]), values(batch, [0, 0], np.int32))
    )
    assert math.isfinite(found["perplexity"])


def test_the_error_of_the_loss_is_that_of_resampled_sequences() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 20, 400).astype(np.float64)
    loss = tokens * rng.gamma(2.0, 0.5, 400)
    measured = {"loss": loss, "hits": tokens * 0.5, "tokens": tokens}
    found = token_scores(measured)
    draws = rng.integers(0, 400, (4000, 400))
    resampled = loss[draws].sum(1) / tokens[draws].sum(1)
    assert found["loss_error"] == pytest.approx(resampled.std(), rel=0.05)
    assert found["token_accuracy_error"] == pytest.approx(0, abs=1e-12)


def test_pairs_of_equal_rewards_count_as_half() -> None:
    rewards = np.array([1.0, 0.0, 0.5, 0.5, 0.0, 2.0, 3.0, 1.0])
    found = pair_scores(pair_measures(rewards))
    assert found["accuracy"] == pytest.approx(2.5 / 4)
    assert found["margin"] == pytest.approx(1 / 4)
    margins = np.array([1.0, 0.0, -2.0, 2.0])
    assert found["margin_error"] == pytest.approx(margins.std(ddof=1) / 2)


def test_a_single_pair_has_no_error() -> None:
    assert pair_scores(pair_measures(np.array([1.0, 0.0]))) == {"accuracy": 1.0, "margin": 1.0}
