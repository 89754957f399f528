"""GDPO: GRPO for several rewards, each normalised in its group before they are added.

    A_k = (r_k - mean of the group) / (std of the group + 1e-6) of each part k
    A = sum of weight_k * A_k / (std of the batch + 1e-6)
    loss = GRPO's

Defaults: weights of 1, clip_low 0.2, clip_high 0.2, aggregation "token". A KL divergence is a term
of the loss.
Source: Liu et al. 2026, "GDPO: Group reward-Decoupled Normalization Policy Optimization".
"""

from __future__ import annotations

from functools import partial

from spmd_rl.algo.algorithm import Algorithm
from spmd_rl.algo.config import PolicyConfig
from spmd_rl.algo.facts import AlgorithmFacts
from spmd_rl.algo.gdpo import gdpo_advantage
from spmd_rl.algo.policy.loss_settings import group_algorithm

FACTS = AlgorithmFacts(
    reads=("reward_weights",),
    ignores=("overlong",),  # it learns from the parts of the reward
)


def gdpo(cfg: PolicyConfig) -> Algorithm:
    """Return GDPO with these settings."""
    advantage = partial(gdpo_advantage, weights=cfg.reward_weights)
    return group_algorithm(cfg, FACTS, advantage)
