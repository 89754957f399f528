"""Scores on held-out data: loss, perplexity and token accuracy, and how pairs are ranked. numpy
only.

Tokens weigh alike in the scores of answers and documents, and pairs in those of pairs. The standard
error of a score is that over sequences or pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from spmd_rl.algo.dpo import REFERENCE
from spmd_rl.algo.losses import column_of
from spmd_rl.types.batch import Batch
from spmd_rl.types.columns import offsets_of
from spmd_rl.types.token_values import TokenValues

Measured = Mapping[str, NDArray[np.float64]]  # numbers of each sequence, by name
LARGEST_LOSS = 700.0  # whose exponential is still a number


def token_measures(batch: Batch, policy: TokenValues, likeliest: TokenValues) -> Measured:
    """Return the sums of each sequence over its learned tokens.

    `policy` are the log-probs of the batch's tokens, and `likeliest` the ids of the tokens that the
    policy finds likeliest at their places.
    Shape: [N].
    """
    hits = likeliest.values.reshape(-1) == batch.tokens
    return {
        "loss": -_sums(batch, policy.values),
        "hits": _sums(batch, hits),
        "tokens": _sums(batch, np.ones(len(batch.tokens))),
    }


def token_scores(measured: Measured) -> dict[str, float]:
    """Return the mean loss of a token in nats, its exponential, and how often the likeliest token
    was the right one; nothing where no token is learned.
    """
    tokens = measured["tokens"]
    if not tokens.sum():
        return {}
    scores = {
        **_ratio("loss", measured["loss"], tokens),
        **_ratio("token_accuracy", measured["hits"], tokens),
    }
    return scores | {"perplexity": math.exp(min(scores["loss"], LARGEST_LOSS))}


def dpo_rewards(batch: Batch, policy: TokenValues, *, beta: float) -> NDArray[np.float64]:
    """Return the implicit reward of each answer, beta * (log-prob of the policy - of the
    reference), in a batch of `pack_pairs` that has the column "reference_logprobs".

    Shape: [2 * pairs], each chosen answer before the rejected one.
    Raises: ContractError without that column.
    """
    remedy = "score the batch with the reference model"
    reference = column_of(batch.columns, REFERENCE, remedy)
    differences = policy.values.astype(np.float64) - reference
    return beta * _sums(batch, differences)


def pair_measures(rewards: NDArray[np.floating]) -> Measured:
    """Return by how much each chosen answer has the higher reward. Shape: [2 * P] to [P]."""
    return {"margin": (rewards[0::2] - rewards[1::2]).astype(np.float64)}


def pair_scores(measured: Measured) -> dict[str, float]:
    """Return the share of pairs that are ranked as labelled, and the mean margin.

    A pair of equal rewards counts as half, as a guess would.
    """
    margins = measured["margin"]
    right = (margins > 0) + 0.5 * (margins == 0)
    ones = np.ones(len(margins))
    return {**_ratio("accuracy", right, ones), **_ratio("margin", margins, ones)}


def _sums(batch: Batch, values: NDArray[np.generic]) -> NDArray[np.float64]:
    """Return the sums of a value over the learned tokens of each sequence. Shape: [T] to [N]."""
    learned = np.where(batch.mask, values.astype(np.float64), 0.0)
    return np.asarray(np.add.reduceat(learned, offsets_of(batch.lengths)[:-1]), np.float64)


def _ratio(name: str, sums: NDArray[np.floating], counts: NDArray[np.floating]) -> dict[str, float]:
    """Return sum / count over all records, and its standard error where there are two or more."""
    ratio, num = sums.sum() / counts.sum(), len(sums)
    scores = {name: float(ratio)}
    if num > 1:
        residuals = sums - ratio * counts
        spread = math.sqrt(float((residuals**2).sum()) / (num * (num - 1)))
        scores[f"{name}_error"] = spread / float(counts.mean())
    return scores
