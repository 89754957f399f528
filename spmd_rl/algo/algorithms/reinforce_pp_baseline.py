"""REINFORCE++-baseline: rewards less the group's mean, whitened over the whole batch.

    A_t = r - mean of the group - kl.coef * (log policy - log reference)
    then (A_t - mean) / sqrt(variance + 1e-8), over all tokens of the batch
    loss = GRPO's

Defaults: clip_low 0.2, clip_high 0.2, aggregation "token". A KL divergence is a reward.
Source: Hu et al. 2025, "REINFORCE++".
"""

from __future__ import annotations

from functools import partial

from spmd_rl.algo.advantages import group_advantage
from spmd_rl.algo.algorithm import Algorithm
from spmd_rl.algo.config import PolicyConfig
from spmd_rl.algo.credit import baseline_credit
from spmd_rl.algo.facts import AlgorithmFacts
from spmd_rl.algo.policy.loss_settings import loss_from, needs_of

FACTS = AlgorithmFacts(kl_place="reward")


def reinforce_pp_baseline(cfg: PolicyConfig) -> Algorithm:
    """Return REINFORCE++-baseline with these settings."""
    advantage = partial(group_advantage, use_std=False)
    credit = partial(baseline_credit, kl_coef=FACTS.kl_reward_coef(cfg.kl))
    return Algorithm(advantage, loss_from(cfg, FACTS), credit=credit, needs=needs_of(cfg))
