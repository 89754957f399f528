"""Credit stage of an algorithm: from the samples' advantages in a batch to those of its tokens.

Each function takes and returns a whole `Batch`, before it is split over ranks. Where a reward is
given for an answer, the batch's advantages hold it on every token of the answer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from spmd_rl.algo.gae import discounted_returns, gae
from spmd_rl.algo.whitening import whiten
from spmd_rl.types.batch import Batch
from spmd_rl.types.columns import offsets_of


def kl_as_reward(batch: Batch, *, kl_coef: float) -> Batch:
    """Return the batch with kl_coef * k1 subtracted from each token's advantage."""
    return _with_advantages(batch, batch.advantages[batch.mask] - _kl_cost(batch, kl_coef))


def reinforce_pp_credit(batch: Batch, *, kl_coef: float, discount: float) -> Batch:
    """Return the batch with REINFORCE++'s advantages: whitened discounted returns.

    Source: Hu et al. 2025 (REINFORCE++).
    """
    rewards, lengths = token_rewards(batch, kl_coef)
    returns = discounted_returns(rewards, lengths, discount=discount)
    return _with_advantages(batch, whiten(returns))


def baseline_credit(batch: Batch, *, kl_coef: float) -> Batch:
    """Return the batch with the advantages of REINFORCE++-baseline: less the KL, then whitened.

    Source: Hu et al. 2025 (REINFORCE++).
    """
    return _with_advantages(batch, whiten(batch.advantages[batch.mask] - _kl_cost(batch, kl_coef)))


def ppo_credit(batch: Batch, *, kl_coef: float, discount: float, gae_lambda: float) -> Batch:
    """Return the batch with PPO's advantages, whitened, and the column "returns" for the critic.

    The column "values" holds the critic's. The returns are advantages before whitening plus values.
    Source: Schulman et al. 2017 (PPO); Ouyang et al. 2022 (KL as a reward of tokens).
    """
    rewards, lengths = token_rewards(batch, kl_coef)
    values = batch.columns["values"][batch.mask].astype(np.float64)
    advantages = gae(rewards, values, lengths, discount=discount, gae_lambda=gae_lambda)
    returns = _on_tokens(batch, advantages + values)
    return _with_advantages(batch, whiten(advantages)).with_columns(returns=returns)


def token_rewards(batch: Batch, kl_coef: float) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the reward of each token in the mask: -kl_coef * k1, and the answer's on its last.

    Also return how many such tokens each sequence has.
    """
    lengths = batch.num_learned
    lasts = offsets_of(lengths)[1:][lengths > 0] - 1
    rewards = -_kl_cost(batch, kl_coef)
    rewards[lasts] += batch.advantages[batch.mask][lasts]
    return rewards, lengths


def mean_k1(batch: Batch) -> float:
    """Return the mean of behaviour - reference log-prob over the tokens in the mask."""
    return float(_k1(batch).mean()) if batch.mask.any() else 0.0


def _kl_cost(batch: Batch, kl_coef: float) -> NDArray[np.float64]:
    """Return kl_coef * k1 of each token in the mask; 0 needs no reference."""
    if not kl_coef:
        return np.zeros(int(batch.mask.sum()))
    return kl_coef * _k1(batch)


def _k1(batch: Batch) -> NDArray[np.float64]:
    """Return behaviour - reference log-prob of each token in the mask."""
    behaviour = batch.columns.get("old_logprobs", batch.rollout_logprobs)[batch.mask]
    reference = batch.columns["reference_logprobs"][batch.mask]
    return behaviour.astype(np.float64) - reference


def _with_advantages(batch: Batch, values: NDArray[np.floating]) -> Batch:
    """Return the batch with these advantages of the tokens in its mask."""
    return replace(batch, advantages=_on_tokens(batch, values))


def _on_tokens(batch: Batch, values: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return the values of the tokens in the mask as a column, 0 elsewhere."""
    column = np.zeros(batch.num_tokens, np.float32)
    column[batch.mask] = values
    return column
