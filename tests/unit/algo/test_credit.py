"""Credit of tokens, by hand: what the critic learns, and answers without a token to learn."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from spmd_rl.algo.credit import ppo_credit, reinforce_pp_credit, token_rewards
from spmd_rl.algo.packing import pack
from spmd_rl.types.batch import Batch
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

REWARDS = [1.0, 0.0, 0.5]


def _batch(lengths: list[int]) -> tuple[Batch, list[NDArray[np.float64]]]:
    """Return answers of these lengths with rewards on their tokens, and a critic's values of each.

    The column "values" holds them.
    """
    rng = np.random.default_rng(3)
    samples = [
        Sample(
            0,
            index,
            np.arange(size, dtype=np.int32),
            np.zeros(size, np.float32),
            np.zeros(size, np.int32),
            "completed",
        )
        for index, size in enumerate(lengths)
    ]
    group = Group(Prompt(0, np.arange(2, dtype=np.int32)), samples)
    batch = pack([group], [np.array(REWARDS[: len(lengths)])])
    column = np.zeros(batch.num_tokens, np.float32)
    column[batch.mask] = rng.normal(size=int(batch.mask.sum()))
    values = np.split(column[batch.mask].astype(np.float64), np.cumsum(lengths)[:-1])
    return batch.with_columns(values=column), values


def _gae_by_hand(
    reward: float, values: NDArray[np.float64], gamma: float, lam: float
) -> list[float]:
    advantages, following, next_value = [], 0.0, 0.0
    for t in reversed(range(len(values))):
        own = reward if t == len(values) - 1 else 0.0
        following = own + gamma * next_value - values[t] + gamma * lam * following
        next_value = values[t]
        advantages.append(following)
    return advantages[::-1]


def test_the_critic_learns_returns_from_advantages_before_whitening() -> None:
    batch, values = _batch([4, 1, 3])
    found = ppo_credit(batch, kl_coef=0.0, discount=0.9, gae_lambda=0.8)
    raw = [_gae_by_hand(r, v, 0.9, 0.8) for r, v in zip(REWARDS, values, strict=True)]
    returns = np.concatenate([np.add(one, own) for one, own in zip(raw, values, strict=True)])
    np.testing.assert_allclose(found.columns["returns"][batch.mask], returns, rtol=1e-6)
    flat = [a for one in raw for a in one]
    mean = math.fsum(flat) / len(flat)
    deviation = math.sqrt(math.fsum((a - mean) ** 2 for a in flat) / (len(flat) - 1))
    whitened = [(a - mean) / deviation for a in flat]
    np.testing.assert_allclose(found.advantages[batch.mask], whitened, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("lengths", [[0, 2, 3], [2, 0, 3], [2, 3, 0], [0, 0, 1]], ids=str)
def test_an_answer_without_tokens_gives_its_reward_to_no_other(lengths: list[int]) -> None:
    batch, _ = _batch(lengths)
    rewards, found_lengths = token_rewards(batch, 0.0)
    assert found_lengths.tolist() == lengths
    expected = [
        reward if token == size - 1 else 0.0
        for reward, size in zip(REWARDS, lengths, strict=True)
        for token in range(size)
    ]
    assert rewards.tolist() == expected


def test_a_batch_of_answers_without_tokens_has_no_credit() -> None:
    batch, _ = _batch([2, 1])
    none = replace(batch, mask=np.zeros_like(batch.mask))
    assert len(token_rewards(none, 0.0)[0]) == 0
    assert not reinforce_pp_credit(none, kl_coef=0.0, discount=1.0).advantages.any()
    assert not ppo_credit(none, kl_coef=0.0, discount=1.0, gae_lambda=1.0).advantages.any()
